"""What all tests share: a home of their own, and one real local pool for the whole session."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import signal
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import chdir, closing, suppress
from pathlib import Path

import pytest

from tests.support import session_leftovers
from tests.support.homes import STORES, new_home
from tests.support.postgres import MISSING, Postgres, binaries

# Airflow, Prefect and MLflow write into the developer's home when they are imported, unless these say otherwise.
_LIBRARIES = tempfile.mkdtemp(prefix="shoal-test-libraries-")
atexit.register(shutil.rmtree, _LIBRARIES, ignore_errors=True)
os.environ["AIRFLOW_HOME"] = f"{_LIBRARIES}/airflow"
os.environ["PREFECT_HOME"] = f"{_LIBRARIES}/prefect"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

pytest_plugins = [
    "tests.support.tiny_pools",
    "tests.support.gpu_machine",
    "tests.support.guides",
    "tests.support.later_schema",
    "tests.support.prefect_server",
    "tests.support.two_node_cluster",
]

with suppress(ModuleNotFoundError):  # where the collection is tested against the newest Prefect
    from hypothesis import settings

    # The same examples in each run: what fails has a cause in the change that is tested.
    settings.register_profile("shoal", derandomize=True)
    settings.load_profile("shoal")


_START_PROCESSES = {"forked_supervisors", "either_tiny", "postgres", "on_postgresql", "shoal_process", "installation"}
"""Fixtures with which processes start: seconds each, so that `make test-fast` leaves these tests out."""


_LEFT = pytest.StashKey[list[str]]()


def pytest_configure() -> None:
    session_leftovers.begin()
    # Terminated, as by `timeout`, a session tears its fixtures down as after Ctrl-C, and so takes its pools down. A
    # process that a test forks is terminated as before.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.register_at_fork(after_in_child=_end_when_terminated)


def _end_when_terminated() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts supervisors, PostgreSQL or the command as a process, by the fixtures that it uses."""
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        parameters = getattr(item, "callspec", None)
        on_postgresql = parameters is not None and STORES[1] in parameters.id.split("-")
        if on_postgresql or names & _START_PROCESSES:
            item.add_marker(pytest.mark.processes)


@pytest.hookimpl(trylast=True)  # after pytest's own, in which an interrupted session tears its fixtures down
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves anything behind, after the last fixture is torn down."""
    if left := session_leftovers.found():
        session.config.stash[_LEFT] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say what was left behind after everything else, where the end of a log shows it."""
    for sentence in config.stash.get(_LEFT, []):
        print(f"left behind: {sentence}", flush=True)


@pytest.fixture(scope="session", autouse=True)
def session_home() -> Iterator[Path]:
    """`$SHOAL_HOME` of the session: nothing touches the developer's own."""
    with pytest.MonkeyPatch.context() as patch, new_home() as folder:
        for name in ("SHOAL_POOL", "SHOAL_STATE_URL", "SHOAL_TEAM", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        # Started with `&` by a script, the session ignores SIGINT, and so would every process that a test interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield folder
    session_leftovers.remove_homes()


@pytest.fixture(autouse=True)
def no_own_pauses() -> Iterator[None]:
    """Tests hand their own clocks to judges of silence; that this process got no CPU time must not move those."""
    with pytest.MonkeyPatch.context() as patched:  # that of the test would outlive its `fresh_home`
        patched.setattr("shoal.own_pauses._GAP_S", math.inf)
        yield


@pytest.fixture(autouse=True)
def own_tracking() -> Iterator[None]:
    """MLflow exports what a test sets in this process (URI, experiment): the next test's jobs must not follow it."""
    yield
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def home_as_before() -> Iterator[None]:
    """A test whose `monkeypatch` outlives its `fresh_home` would bring back the fresh home for all later tests."""
    before = os.environ.get("SHOAL_HOME")
    yield
    assert os.environ.get("SHOAL_HOME") == before


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temp folder for one test, as /tmp is: every user may write to it."""
    folder = Path(tempfile.mkdtemp(prefix=""))  # the longest path that leaves room for sockets
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def migrated_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty store of today's schema: copied in a millisecond; Alembic takes 40, in a new process 300."""
    from shoal.state import Store

    file = tmp_path_factory.mktemp("store") / "state.db"
    Store(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all of it into the one file
    return file


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an MLflow database without any run: copied in a millisecond; MLflow's migrations take seconds."""
    import mlflow

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with chdir(file.parent):  # here lies the folder of the first experiment's artifacts, ./mlruns
        mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def fresh_home(migrated_store: Path) -> Iterator[Path]:
    """A home for one test: its own store, which is migrated already, its own pools."""
    with new_home() as folder:
        if "SHOAL_STATE_URL" not in os.environ:
            shutil.copy(migrated_store, folder / migrated_store.name)
        yield folder


@pytest.fixture
def empty_home() -> Iterator[Path]:
    """A home for one test with nothing in it, as on a user's first call."""
    with new_home() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The one PostgreSQL server of the session."""
    if binaries() is None:
        pytest.skip(MISSING)
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture
def on_postgresql(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[Postgres]:
    """The store of this test is an empty database of its own in PostgreSQL."""
    name = f"shoal_{uuid.uuid4().hex[:8]}"
    postgres.run(f"CREATE DATABASE {name}")
    monkeypatch.setenv("SHOAL_STATE_URL", postgres.url(name))
    yield postgres
    postgres.run(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=STORES)
def either_store(request: pytest.FixtureRequest) -> Path:
    """A fresh home with its own store, once on SQLite and once on PostgreSQL."""
    if request.param == "postgresql":
        request.getfixturevalue("on_postgresql")
    return request.getfixturevalue("fresh_home")


@pytest.fixture(scope="session")
def real_pool(session_home: Path) -> Iterator:
    """The one real pool of the session: up with its head, 1 CPU a node, 4 nodes at most."""
    from shoal import ComputePool, jobs

    # A session that was killed takes nothing down: its pool does so itself after an hour without use.
    pool = ComputePool("local://tests?max_nodes=4&idle_timeout=3600").up()
    yield pool
    pool.down()
    assert jobs.sweep() == []


@pytest.fixture
def pool(real_pool):
    """The session's pool with 3 nodes."""
    from shoal import jobs
    from shoal.state.schema import JOB_ACTIVE

    if len(real_pool.get_nodes()) != 3:
        real_pool.scale(3)
    yield real_pool
    for job in jobs.list_jobs(real_pool.name, states=JOB_ACTIVE):  # of a test that failed: they would keep the nodes
        jobs.cancel(job.job_id)
