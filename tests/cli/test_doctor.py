"""`shoal doctor`."""

import email
import importlib.metadata
import os
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import psutil
import pytest

from shoal import installation
from shoal.airflow import get_provider_info
from shoal.cli import doctor_checks as checks
from shoal.errors import MissingExtraError
from shoal.pool.api import list_pools
from shoal.pool.backends.local.backend import LocalBackend
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.private_folders import runtime_root
from tests.cli.conftest import document
from tests.support.waiting import wait_until


def by_name(result):
    return {check["name"]: check for check in document(result.stdout)["checks"]}


def test_a_healthy_machine(shoal, a_pool):
    result = shoal("doctor", "--json")
    assert result.exit_code == 0
    found = by_name(result)
    for name in (
        "Python",
        "ray",
        "data",
        "xgboost",
        "mlflow",
        "SHOAL_HOME",
        "state store",
        "folder of running nodes",
        "reconciler",
    ):
        assert found[name]["status"] == "ok"
    assert found[f"pool {a_pool}"]["status"] == "ok"
    assert "local pools can work on this machine" in shoal("doctor").stdout
    refused = shoal("doctor", "--artifact-location", "s3://bucket")
    assert refused.exit_code and "add --pool" in refused.output


def test_every_extra_is_checked():
    extras = {*importlib.metadata.metadata("shoal").get_all("Provides-Extra")} - {"all", "xgboost-gpu"}
    assert {found.name for found in checks.all_checks()} >= extras


def test_another_distribution_with_a_package_of_this_name_is_named(tmp_path, monkeypatch):
    info = tmp_path / "shoal_sharkbite-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal-sharkbite\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("shoal\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    [finding] = [found for found in checks.all_checks() if found.name == "shoal"]
    assert finding.status == "broken"
    assert "pip uninstall shoal-sharkbite" in finding.advice


def test_two_distributions_with_the_same_files_are_named(monkeypatch):
    monkeypatch.setattr(checks, "installed", {"xgboost": "3.2.0", "xgboost-cpu": "3.2.0"}.get)
    [finding] = [found for found in checks.all_checks() if found.name == "xgboost"]
    assert (finding.status, finding.found) == ("note", "xgboost and xgboost-cpu have installed the same files")
    assert "pip uninstall xgboost xgboost-cpu" in finding.advice


def test_names_and_addresses_are_those_of_the_distribution(monkeypatch):
    renamed = email.message_from_string("Name: shoal-ml\nProject-URL: Documentation, https://docs.example/en/\n")
    monkeypatch.setattr(installation, "distribution", lambda: SimpleNamespace(metadata=renamed))
    assert (installation.name(), installation.address("Documentation")) == ("shoal-ml", "https://docs.example/en")
    assert 'pip install "shoal-ml[tune]"' in str(MissingExtraError("optuna", "tune"))
    assert get_provider_info()["package-name"] == "shoal-ml"
    monkeypatch.setattr(installation, "distribution", lambda: None)
    assert (installation.name(), installation.address("Documentation")) == ("shoal", None)


def test_without_ray_local_pools_are_broken(shoal, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name in ("ray", "mlflow"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    for absent in ("ray", "pandas"):
        monkeypatch.setitem(sys.modules, absent, None)  # as if it were not installed
    result = shoal("doctor", "--json")
    assert result.exit_code == 1
    assert by_name(result)["ray"] == {
        "name": "ray",
        "status": "broken",
        "found": "not installed",
        "advice": 'pip install "shoal[ray]"; not needed if you only use remote pools',
    }
    assert {name: by_name(result)[name]["status"] for name in ("data", "mlflow")} == {"data": "note", "mlflow": "note"}
    assert "shoal[mlflow]" in shoal("doctor").stdout
    refused = shoal("pool", "up", "local://without-ray")
    assert refused.exit_code and 'install it with `pip install "shoal[ray]"`' in refused.output
    assert list_pools() == []


@pytest.mark.parametrize(("version", "status"), [("2.60.3", "ok"), ("2.61.0", "note"), ("2.6.0", "note")])
def test_another_minor_of_ray_than_the_tested_one_is_a_note_and_a_warning(fresh_home, monkeypatch, version, status):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert checks._ray().status == status
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        LocalBackend().admit(PoolSpec.parse("local://p"), 1)
    said = [f"local pools are tested with Ray 2.60, and Ray {version} is installed"] if status == "note" else []
    assert [str(one.message).partition(":")[0] for one in warned] == said


def test_a_home_that_cannot_be_made(shoal, tmp_path):
    (tmp_path / "file").write_text("")
    result = shoal("doctor", "--json", env={"SHOAL_HOME": str(tmp_path / "file" / "home")})
    assert result.exit_code == 1
    assert by_name(result)["SHOAL_HOME"]["status"] == "broken"
    assert "state store" not in by_name(result)


def test_a_store_that_cannot_be_opened(shoal, fresh_home):
    (fresh_home / "state.db").write_text("this is no database, whatever its name says")
    result = shoal("doctor", "--json")
    assert result.exit_code == 1
    assert "move it away" in by_name(result)["state store"]["found"]


def test_a_store_that_others_could_read_is_a_note(shoal, fresh_home):
    Store()
    (fresh_home / "state.db").chmod(0o644)
    assert "had mode 0644, now 0600" in shoal("doctor").output
    assert "only you can read it (mode 0600)" in shoal("doctor").output


def test_a_temporary_folder_with_a_long_path(shoal, fresh_home, tmp_path, monkeypatch):
    folder = tmp_path / "a-path-that-is-too-long-for-sockets-under-it"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    long = by_name(shoal("doctor", "--json"))["folder of running nodes"]
    assert long["status"] == "broken"
    assert "107 are allowed" in long["found"]
    assert "TMPDIR" in long["advice"]


def test_leftovers_and_a_pool_that_does_not_exist_are_notes(shoal):
    folder = runtime_root() / "0123456789"
    folder.mkdir(parents=True)
    result = shoal("doctor", "--json", env={"SHOAL_POOL": "nope"})
    assert result.exit_code == 0
    assert by_name(result)["left-over nodes"]["found"] == "0123456789"
    assert "shoal sweep" in by_name(result)["left-over nodes"]["advice"]
    assert by_name(result)["SHOAL_POOL"]["status"] == "note"
    assert document(shoal("sweep", "--json").stdout)["left"] == []
    assert not folder.exists()


def test_what_sweep_cannot_end_is_a_failure(shoal, monkeypatch):
    monkeypatch.setattr("shoal.cli.doctor_checks.leftovers", lambda store: ["0123456789"])
    result = shoal("sweep", "--json")
    assert result.exit_code == 1
    assert document(result.stdout)["left"] == ["0123456789"]


def test_a_reconciler_that_is_stopped_is_mentioned(shoal, fresh_home, a_pool):
    environment = {**os.environ, "SHOAL_HOME": str(fresh_home)}
    with subprocess.Popen(
        [sys.executable, "-c", "input()", "shoal.reconciler"], env=environment, stdin=subprocess.PIPE
    ) as process:
        try:
            assert by_name(shoal("doctor", "--json"))["reconciler"]["found"] == f"runs, pid {process.pid}"
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the stop")

            found = by_name(shoal("doctor", "--json"))["reconciler"]

            assert found["status"] == "note"
            assert found["found"].startswith(f"is suspended (SIGSTOP), pid {process.pid}: ")
            assert f"kill -CONT {process.pid}" in found["advice"]
            assert f"the reconciler is suspended (SIGSTOP), pid {process.pid}: " in shoal("pool", "describe").stderr
        finally:
            process.kill()


@pytest.mark.parametrize(("hard", "status"), [(256, "broken"), (2048, "note"), (65536, "ok"), (-1, "ok")])
def test_open_files(monkeypatch, hard, status):
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, hard))
    assert checks._open_files().status == status


@pytest.mark.parametrize(("free", "status"), [(100, "broken"), (2000, "note"), (50_000, "ok")])
def test_disk(monkeypatch, tmp_path, free, status):
    from shutil import _ntuple_diskusage as usage

    total = 100_000 * 1024**2
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(total, total // 2, free * 1024**2))
    assert checks._disk("disk", tmp_path).status == status
