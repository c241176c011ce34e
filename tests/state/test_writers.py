"""Writers wait for each other: for as long as others go on writing, and never longer than a statement needs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import ColumnElement, Connection, event, func, select
from sqlalchemy.ext.compiler import compiles

from shoal.errors import StoreUnreachableError
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.journal.job_queue import Admission
from shoal.state import Store, databases
from shoal.state.schema import Lock
from shoal.training.demand import GangClaim
from tests.support.job_store import POOL, add_node, add_pool

LIMIT_S = 0.02
ADD_ROW = "INSERT INTO locks (name, holder, expires_at) VALUES (hex(randomblob(8)), 'other', 0)"


@pytest.fixture
def other(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """Another program that is writing to the SQLite store; the limit on waiting for it is short."""
    monkeypatch.setattr(databases, "LOCK_WAIT_S", LIMIT_S)
    monkeypatch.setattr(databases, "_TRY_S", LIMIT_S / 2)
    with closing(sqlite3.connect(fresh_home / "state.db", isolation_level=None, timeout=0)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(ADD_ROW)
        yield connection


@pytest.fixture
def after_each_try(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], None]:
    """Calls a function each time that a writer has tried in vain to get the lock."""

    def listen(act: Callable[[], object]) -> None:
        def tried(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            if statement == "PRAGMA data_version":
                act()

        engine = Store()._engine
        event.listen(engine, "before_cursor_execute", tried)
        request.addfinalizer(lambda: event.remove(engine, "before_cursor_execute", tried))

    return listen


def write(name: str) -> None:
    with Store().transaction() as session:
        session.add(Lock(name=name, holder="test", expires_at=0))


def test_a_writer_waits_as_long_as_others_go_on_writing(other, after_each_try):
    """Twenty others get the lock first, one after another: a limit on the whole wait would lose this write."""
    turns = iter(range(20))

    def next_turn() -> None:
        other.execute("COMMIT")
        if next(turns, None) is not None:
            other.execute("BEGIN IMMEDIATE")
            other.execute(ADD_ROW)

    after_each_try(next_turn)
    write("patient")

    with Store().reading() as session:
        assert session.get(Lock, "patient") is not None
        assert session.scalar(select(func.count()).select_from(Lock).where(Lock.holder == "other")) == 21


def test_a_writer_that_keeps_the_lock_is_reported_to_those_who_wait(other, after_each_try):
    tries: list[None] = []
    after_each_try(lambda: tries.append(None))

    with pytest.raises(StoreUnreachableError, match=r"database is locked.*may be paused"):
        write("impatient")
    assert len(tries) == 3  # the first one shows how far the others are, and two more make the limit

    other.execute("COMMIT")
    write("later")


class Prepared(ColumnElement[int]):
    """The number 1; while SQLAlchemy translates it to SQL, somebody else writes to the store."""

    inherit_cache = False


@compiles(Prepared)
def _prepare(_element: Prepared, *_: object, **__: object) -> str:
    write("meanwhile")
    return "1"


def test_others_write_while_a_statement_is_prepared(either_store, monkeypatch):
    """In a new process, this takes longer than the transaction itself."""
    monkeypatch.setattr(databases, "_BEGIN_WRITING", databases._BEGIN_WRITING.replace("120s", "1s"))
    monkeypatch.setattr(databases, "LOCK_WAIT_S", LIMIT_S)
    monkeypatch.setattr(databases, "_TRY_S", LIMIT_S / 2)

    with Store().transaction() as session:
        assert session.scalar(select(Prepared())) == 1
        assert session.get(Lock, "meanwhile") is not None


@pytest.fixture
def written(either_store: Path) -> Iterator[list[str]]:
    """The first three words of each statement on jobs that is executed while other writers wait."""
    statements: list[str] = []

    def executed(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if not connection.get_execution_options().get(databases._READ_ONLY) and "jobs" in statement:
            statements.append(" ".join(statement.split()[:3]))

    engine = Store()._engine
    event.listen(engine, "after_cursor_execute", executed)
    yield statements
    event.remove(engine, "after_cursor_execute", executed)


def test_a_submission_without_room_keeps_other_writers_waiting_for_two_statements(written):
    store = Store()
    add_pool(store)
    add_node(store, cpus=1)
    keys = [Key(f"job-{number}", 1) for number in range(2)]

    def submit(key: Key) -> Admission:
        order = Order(key.job_id, POOL, "airflow:d/r", {"fingerprint": "q"}, {}, None, 0, GangClaim(1, 1).to_json())
        attempts.ask(store, order, 0.0)
        return job_queue.admit(store, key, 1.0, {})

    assert submit(keys[0]) is Admission.NOW
    written.clear()
    assert submit(keys[1]) is Admission.WAITS
    assert written == ["INSERT INTO jobs", "UPDATE jobs SET"]
    written.clear()
    assert job_queue.admit(store, keys[1], 2.0, {}) is Admission.WAITS
    assert job_queue.admit(store, keys[0], 2.0, {}) is Admission.BEFORE
    assert written == []
