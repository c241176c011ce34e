"""An upgrade under a pool and a job that run: what the version before has started, today's code takes over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from shoal import ComputePool, jobs
from shoal.jobs import JobHandle, parse_spec
from shoal.jobs.submission import fingerprint
from shoal.os_processes import ProcessId
from shoal.pool.api import list_pools
from shoal.state import Store, home
from shoal.state.private_folders import runtime_root
from shoal.state.schema import JobState, Lock, NodeState, PoolState
from tests.support.pool_processes import node_rows, processes_of_home
from tests.support.previous_version import HOLDER, POOL, document
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
BEFORE, ITS_SCHEMA = "7f2f0bc0", "0013"
"""Commit of the version before, and the schema that it knows."""


class Installation:
    """The version before in an environment of its own, beside today's."""

    def __init__(self, folder: Path) -> None:
        before = folder / "before"
        before.mkdir()
        archive = subprocess.run(["git", "archive", BEFORE, "providers"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(before)], input=archive.stdout, check=True)
        self.environment = {"PYTHONPATH": os.pathsep.join([str(before / "providers"), str(ROOT)])}

    def run(self, *arguments: str) -> str:
        """Run Python in this environment and return what it prints."""
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **self.environment},
            cwd=home(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def installation(tmp_path: Path, empty_home: Path) -> Installation:
    known = ["git", "cat-file", "-e", f"{BEFORE}^{{commit}}"]
    if shutil.which("git") is None or subprocess.run(known, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip(f"commit {BEFORE} is not here: this is a shallow clone, or none")
    return Installation(tmp_path)


def schema_in_store() -> str:
    engine = sa.create_engine(f"sqlite:///{home() / 'state.db'}")
    with engine.connect() as connection:
        return str(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar())


def code_of(supervisor: ProcessId) -> str:
    """The code that Python imports in the environment of a process."""
    entries = Path(f"/proc/{supervisor.pid}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in entries if entry)
    import_it = [sys.executable, "-c", "import shoal, os; print(os.path.realpath(shoal.__file__))"]
    return subprocess.run(import_it, env=environment, cwd="/", capture_output=True, text=True, check=True).stdout


@pytest.fixture
def running(installation: Installation, later_schema: str, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A pool, a lease and a job that the version before has started: `job_id` and `runtime_root`."""
    made = json.loads(installation.run("-m", "tests.support.previous_version", "start", str(tmp_path)))
    yield made
    for status in list_pools():
        ComputePool(status.name).down()
    shutil.rmtree(made["runtime_root"], ignore_errors=True)


@pytest.mark.ray
@pytest.mark.timeout(600)  # two nodes and two jobs start one after the other
def test_a_pool_and_a_job_of_the_version_before_go_on_after_the_store_is_upgraded(
    installation, running, later_schema, tmp_path
):
    wait_until((tmp_path / "began").exists, "the job's function", seconds=120)
    assert schema_in_store() == ITS_SCHEMA
    with Store(migrate=False).reading() as session:
        [supervisor] = session.execute(sa.text("SELECT supervisor FROM nodes")).scalars()
    assert code_of(ProcessId.from_json(json.loads(supervisor))).startswith(str(tmp_path / "before"))

    pool = ComputePool(POOL, holder=HOLDER)

    assert schema_in_store() == later_schema
    assert pool.renew()
    asked_again = ask(tmp_path)
    assert (asked_again.job_id, asked_again.attempt) == (running["job_id"], 1)
    assert asked_again.status().state is JobState.RUNNING
    (tmp_path / "go").touch()
    wait_until(lambda: asked_again.status().state is JobState.SUCCEEDED, "the job's end", seconds=120)
    found = ask(tmp_path)
    assert found.attempt == 1
    assert jobs.load_results(found.wait(on_log=None)).results == (ITS_SCHEMA,)
    assert ask(tmp_path, job_id="new").wait(on_log=None).attempt == 1
    assert jobs.load_results(jobs.attach("new").wait(on_log=None)).results == (ITS_SCHEMA,)  # in the head's environment
    assert pool.scale(2)
    assert [node.state for node in node_rows()] == [NodeState.READY] * 2
    assert pool.release()
    pool.down()

    assert [table for table in ("nodes", "demand", "leases", "locks") if count(table)] == []
    assert [status.state for status in list_pools()] == [PoolState.DOWN]
    assert (node_folders(running), [*(home() / "credentials").iterdir()]) == ([], [])
    wait_until(lambda: not processes_of_home(), "the end of every process of the home")


def ask(folder: Path, **run_config: Any) -> JobHandle:
    return jobs.submit(jobs.parse_spec(document(folder, **run_config)), holder=HOLDER)


def count(table: str) -> int:
    with Store().reading() as session:
        return session.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one()


def node_folders(running: dict[str, Any]) -> list[Path]:
    """What is left where either version keeps its nodes."""
    roots = [Path(running["runtime_root"]), runtime_root()]
    return [path for root in roots if root.exists() for path in root.rglob("*") if path.is_dir()]


SPECS = [
    {"dataset": {"paths": ["s3://bucket/train"]}, "input_cols": ["a"], "label_col": "y"},
    {
        "framework": "lightgbm",
        "dataset": {"paths": ["/data/train"]},
        "input_cols": ["a", "b"],
        "categorical_cols": ["b"],
        "label_col": "y",
        "eval_set": {"eval": {"paths": ["/data/eval"]}},
        "params": {"objective": "regression", "max_bin": 63},
        "n_estimators": 10,
        "early_stopping_rounds": 3,
        "register": {"model": "m", "metric": "rmse", "holdout": {"paths": ["/data/holdout"]}},
        "run_config": {"job_id": "nightly", "timeout": 60.5, "orphan_after": None, "artifact_location": "/models"},
    },
    document(Path("/work"), seed=1),
]

FINGERPRINTS = """
import json, sys
from shoal.jobs import parse_spec
from shoal.jobs.submission import fingerprint
print(json.dumps([fingerprint(parse_spec(json.loads(spec)).identifying("pool", {})) for spec in sys.argv[1:]]))
"""


def test_the_fingerprint_of_a_spec_survives_an_upgrade(installation):
    today = [parse_spec(spec).completed("pool", {}) for spec in SPECS]

    before = json.loads(installation.run("-c", FINGERPRINTS, *map(json.dumps, SPECS)))
    of_todays_documents = installation.run("-c", FINGERPRINTS, *[json.dumps(spec.document()) for spec in today])

    assert [fingerprint(parse_spec(spec).identifying("pool", {})) for spec in SPECS] == before
    assert json.loads(of_todays_documents) == before  # a driver of the version before reads what is submitted today


REFUSED = """
from shoal.errors import StoreError
from shoal.state import Store
from shoal.state.schema import Lock
with Store(migrate=False).transaction() as session:
    session.add(Lock(name="of a running process", holder="before", expires_at=0))
try:
    Store()
except StoreError as error:
    print(error)
"""


def test_the_version_before_refuses_an_upgraded_store_and_its_running_processes_use_it(installation, later_schema):
    store = Store()

    said = installation.run("-c", REFUSED)

    assert f"(its schema is {later_schema}, this version supports {ITS_SCHEMA}): upgrade shoal" in said
    with store.reading() as session:
        assert session.get_one(Lock, "of a running process").holder == "before"
