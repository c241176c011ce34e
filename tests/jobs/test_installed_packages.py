"""What a job brings with it: variables, packages and code, and the versions that it needs of a pool."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import JobSpec, credentials, shipped_code, submission
from shoal.jobs.files import storage
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.submission import fingerprint
from shoal.os_processes import ProcessId
from shoal.pool.backends import versions
from shoal.state.home import home
from shoal.state.schema import Pool
from shoal.training.host import imports
from shoal.training.pytorch.worker import Machine, environments
from shoal.training.run_config import RunConfig
from tests.support.wheels import write_wheel

needs_uv = pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "mypkg"
    for name in ("__init__.py", "deep/model.py", "data.txt", ".git/config", "__pycache__/model.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_options_are_stored_as_they_are_given():
    given = {"env": {"A": "1"}, "secret_env": ["HF_TOKEN"], "packages": ["einops==0.8"], "code": ["/x/mypkg"]}
    assert RunConfig.parse(given).model_dump(mode="json").items() >= given.items()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"env": {"HF_TOKEN": "hf_123456"}},
            r'secret, .* stored with the job: .* secret_env=\["HF_TOKEN"\]',
        ),
        ({"env": {"A B": "1"}}, '"A B" is not the name of an environment variable'),
        ({"env": {"RAY_ADDRESS": "x"}}, "RAY_ADDRESS cannot be set for a job"),
        ({"env": {"PYTHONPATH": "x"}}, "use the options code and packages"),
        (
            {"env": {"MY_PIN": "1"}, "secret_env": ["MY_PIN"]},
            "env and secret_env contain the same variables: MY_PIN",
        ),
        ({"secret_env": "HF_TOKEN"}, r'must be a list such as \["a", "b"\]'),
        ({"packages": ["--index-url=http://x"]}, "is not a package"),
        (
            {"packages": ["x @ https://me:hf_123456@host/x.whl"]},
            r'"x @ https://host/x.whl" contains credentials, .* set UV_INDEX .* secret_env=\["UV_INDEX"\]',
        ),
        ({"packages": ["x @ git+https://hf_123456@host/x.git"]}, "contains credentials"),
        ({"code": 3}, "code"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], says: str):
    with pytest.raises(InvalidArgumentError, match=says) as refused:
        RunConfig.parse(given)
    assert "hf_123456" not in str(refused.value)


def test_a_variable_with_a_secret_name_is_refused():
    passed_on = [
        *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        *("AWS_SESSION_TOKEN", "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING"),
        *("AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET", "AZURE_CLIENT_CERTIFICATE_PASSWORD", "DATABRICKS_TOKEN"),
        *("DATABRICKS_PASSWORD", "DATABRICKS_CLIENT_SECRET", "SNOWFLAKE_PASSWORD", "SNOWFLAKE_TOKEN"),
        *("SNOWFLAKE_PRIVATE_KEY", "SNOWFLAKE_PRIVATE_KEY_RAW", "SNOWFLAKE_PRIVATE_KEY_PASSPHRASE"),
    ]
    others = [
        "PGPASSWORD",
        "NPM_TOKEN",
        "OPENAI_KEY",
        "OPENAI_APIKEY",
        "MYSQL_PWD",
        "DB_PASS",
        "HF_TOKEN_2",
        "my_token",
    ]
    assert credentials.from_environment(dict.fromkeys(passed_on, "x")).keys() == set(passed_on)
    for name in (*passed_on, *others):
        with pytest.raises(InvalidArgumentError, match=rf'"{name}" looks like the name of a secret'):
            RunConfig(env={name: "12345678"})
    plain = [
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "AWS_REGION",
        "AZURE_STORAGE_ACCOUNT",
        "SNOWFLAKE_PRIVATE_KEY_FILE",
    ]
    plain += [
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "MONKEY",
        "COMPASS",
        "KEYBOARD",
        "UV_INDEX",
    ]
    assert RunConfig(env=dict.fromkeys(plain, "1")).env.keys() == set(plain)


def test_variables_that_shoal_sets_are_refused():
    (theirs,) = environments([Machine("a", "::1", ("0",), 1)], threads=1, restarts=0, max_restarts=0)
    for name in (*theirs, "MLFLOW_RUN_ID"):
        with pytest.raises(InvalidArgumentError, match=f"{name} cannot be set for a job"):
            RunConfig(env={name: "1"})


def test_settings_of_databricks_travel_but_not_those_of_its_machines():
    there = {
        "DATABRICKS_HOST": "https://x",
        "DATABRICKS_TOKEN": "t",
        "DATABRICKS_RUNTIME_VERSION": "16",
        "HF_TOKEN": "t",
    }
    assert credentials.from_environment(there).keys() == {"DATABRICKS_HOST", "DATABRICKS_TOKEN"}


class TestCode:
    def test_an_archive_is_named_by_the_content_alone(self, fresh_home, package, tmp_path):
        (found,) = shipped_code.stored([str(package)])
        (package / ".git" / "config").write_text("changed")
        assert shipped_code.stored([str(package)]) == (found,) == shipped_code.stored([found])

        shipped_code.unpack([found], tmp_path / "there")

        files = {
            str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()
        }
        assert files == {"mypkg/__init__.py", "mypkg/deep/model.py", "mypkg/data.txt"}
        shipped_code.unpack(shipped_code.stored([str(package / "data.txt")]), tmp_path / "data")
        assert (tmp_path / "data" / "data.txt").read_text() == (package / "data.txt").read_text()
        (package / "data.txt").write_text("changed")
        assert shipped_code.stored([str(package)]) != (found,)

    def test_code_that_cannot_be_imported_is_refused(self, fresh_home, package, tmp_path):
        (tmp_path / "my-file.py").touch()
        (tmp_path / "my-folder").mkdir()
        (tmp_path / "mypkg.py").touch()
        for paths, says in (
            ([tmp_path / "nope"], "does not exist"),
            ([tmp_path / "my-file.py"], "cannot be imported"),
            ([tmp_path / "my-folder"], "cannot be imported"),
            ([package, tmp_path / "mypkg.py"], 'two modules called "mypkg"'),
        ):
            with pytest.raises(InvalidArgumentError, match=says):
                shipped_code.stored([str(path) for path in paths])


@needs_uv
@pytest.mark.processes
class TestPackages:
    @pytest.fixture(autouse=True)
    def index(self, tmp_path, monkeypatch):
        """Settings in uv's own file, as an administrator gives them to the nodes."""
        write_wheel(tmp_path, "tidbit", "1.0", "ANSWER = 42", requires=["psutil"])
        write_wheel(tmp_path, "greedy", "1.0", "", requires=["ray==1.0"])
        write_wheel(tmp_path, "ray", "1.0", "")
        settings = tmp_path / "uv.toml"
        settings.write_text(f'no-index = true\nfind-links = ["{tmp_path}"]\n')
        monkeypatch.setenv("UV_CONFIG_FILE", str(settings))

    def test_only_what_this_python_lacks_is_installed(self, tmp_path):
        assert shipped_code.install(["tidbit"], tmp_path / "there", {}) == ("tidbit==1.0",)
        assert (tmp_path / "there" / "tidbit" / "__init__.py").exists()
        assert not (tmp_path / "there" / "psutil").exists()
        assert shipped_code.install(["psutil"], tmp_path / "nothing", {}) == ()

    def test_what_cannot_be_installed_is_said(self, tmp_path):
        with pytest.raises(JobError, match=r"run_config.packages \(nonesuch\) cannot be installed: .*nonesuch was not"):
            shipped_code.install(["nonesuch"], tmp_path / "there", {})
        with pytest.raises(JobError, match=r"would install ray==1\.0 for the workers"):
            shipped_code.install(["greedy"], tmp_path / "there", {})

    def test_a_pool_installs_them_once_until_it_gets_another_head(self, fresh_home, capsys, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])
        config = RunConfig(packages=["tidbit"])
        first, again, new = (shipped_code.runtime_env(config, "p", gcs)["py_modules"] for gcs in ("a:1", "a:1", "b:2"))
        assert first == again != new
        assert capsys.readouterr().out.count("installed tidbit==1.0") == 2
        assert [Path(folder).exists() for folder in (*first, *new)] == [False, True]

    def test_the_driver_can_import_them_too_but_prefers_those_of_the_node(self, fresh_home, package, monkeypatch):
        before = [*sys.path]
        monkeypatch.setattr(sys, "path", [*before])
        config = RunConfig(packages=["tidbit"], code=shipped_code.stored([str(package)]))
        installed, own = shipped_code.runtime_env(config, "p", "a:1")["py_modules"]
        assert sys.path == [*before, own, installed]


def test_shipped_modules_come_before_those_of_the_node(tmp_path, monkeypatch):
    for name in (imports.CODE, imports.PACKAGES):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", ["/node", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "/other")
    imports.add_to_path()
    assert sys.path == [f"{tmp_path}/shoal_code", f"{tmp_path}/shoal_packages", "/node", str(tmp_path)]


class TestSubmission:
    def test_secrets_are_named_in_the_row_and_handed_over_in_the_file(self, store, head, spec, monkeypatch):
        monkeypatch.setenv("MY_PIN", "seven-7-seven")
        config = spec.run_config.model_copy(update={"secret_env": ("MY_PIN",), "env": {"PLAIN": "1"}})
        handle = submission.submit(spec.model_copy(update={"run_config": config}), endpoint_of=lambda _: head.endpoint)
        key = Key(handle.job_id, handle.attempt)

        assert "seven-7-seven" not in str(attempts.load(store, key).spec)
        taken = credentials.take(key.submission_id)
        assert taken.environment["MY_PIN"] == "seven-7-seven"
        assert taken.redact("the pin is seven-7-seven") == "the pin is ***"

    def test_a_secret_that_is_not_set_is_refused(self, store, head, spec, monkeypatch):
        monkeypatch.delenv("MY_PIN", raising=False)
        config = spec.run_config.model_copy(update={"secret_env": ("MY_PIN",)})
        with pytest.raises(InvalidArgumentError, match="secret_env names MY_PIN, but this process has no such"):
            submission.submit(spec.model_copy(update={"run_config": config}), endpoint_of=lambda _: head.endpoint)
        assert head.submissions == 0

    def test_code_is_stored_and_another_code_is_another_job(self, store, head, spec, package):
        def fingerprint_now() -> str:
            config = spec.run_config.model_copy(update={"code": (str(package),)})
            handle = submission.submit(
                spec.model_copy(update={"run_config": config}), endpoint_of=lambda _: head.endpoint
            )
            row = attempts.load(store, Key(handle.job_id, handle.attempt))
            with zipfile.ZipFile(*row.spec["run_config"]["code"]) as archive:
                assert "mypkg/data.txt" in archive.namelist()
            return str(row.spec["fingerprint"])

        first, same = fingerprint_now(), fingerprint_now()
        (package / "data.txt").write_text("changed")
        assert first == same != fingerprint_now()

    @pytest.mark.parametrize(
        ("theirs", "library", "says"),
        [
            ({"python": "3.9.1"}, False, r'pool "retrain" runs Python 3\.9\.1, but this process runs Python 3\.'),
            ({"shoal": "99.1"}, False, 'pool "retrain" runs shoal 99.1, but this process runs shoal'),
            ({"xgboost": "1.0"}, True, 'pool "retrain" runs XGBoost 1.0, but this process runs XGBoost'),
            ({"xgboost": "1.0"}, False, None),
            ({"python": "3.9", "prefix": sys.prefix}, True, None),
            ({}, True, None),
        ],
    )
    def test_a_pool_of_other_versions_is_refused(self, store, head, spec, theirs, library, says):
        where = dataclasses.replace(head.endpoint, versions=theirs)
        if says is None:
            submission.submit(spec, endpoint_of=lambda _: where, returns_model=library)
            return
        with pytest.raises(InvalidArgumentError, match=says):
            submission.submit(spec, endpoint_of=lambda _: where, returns_model=library)
        assert head.submissions == 0


def test_workers_run_in_the_callers_folder_on_an_embedded_pool_only(store, head, spec, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    handle = submission.submit(spec, endpoint_of=lambda _: head.endpoint)
    row = attempts.load(store, Key(handle.job_id, handle.attempt))

    assert storage.of_attempt(store, row, "job-1") == str(home() / "work" / "job-1")
    with store.transaction() as session:
        session.get_one(Pool, row.pool).owner = ProcessId.mine().to_json()
    assert storage.of_attempt(store, row, "job-1") == str(tmp_path)
    storage.discard("job-1")
    assert not (home() / "work" / "job-1").exists() and tmp_path.exists()


def test_a_head_records_its_versions():
    row = {"api": "http://x", **versions.to_record(versions.mine())}
    assert versions.recorded(row) == versions.mine()
    assert versions.recorded({"api": "http://x"}) == {}


def test_the_fingerprint_counts_the_new_options():
    fields = {"dataset": {"paths": ["/data"]}, "input_cols": ["a"], "label_col": "y"}
    plain = fingerprint(JobSpec.parse(fields))
    assert fingerprint(JobSpec.parse({**fields, "run_config": {"packages": []}})) == plain
    assert fingerprint(JobSpec.parse({**fields, "run_config": {"packages": ["einops"]}})) != plain
    here, moved, changed = (
        fingerprint(JobSpec.parse({**fields, "run_config": {"code": [f"{home}/jobs/_code/{digest * 64}"]}}))
        for home, digest in [("/a", "0"), ("/b", "0"), ("/a", "1")]
    )
    assert here == moved and len({here, changed, plain}) == 3
