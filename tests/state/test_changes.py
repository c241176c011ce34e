"""A watcher of the store reads rows only after a write."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import event

from shoal.state import Store, changes
from shoal.state.changes import StoreChanges
from shoal.state.schema import Lock
from tests.support.postgres import Postgres
from tests.support.waiting import wait_until


def write(name: str) -> None:
    with Store().transaction() as session:
        session.add(Lock(name=name, holder="test", expires_at=0))


def stays(watcher: StoreChanges) -> bool:
    return watcher.sign() == watcher.sign()


def test_each_write_is_seen_and_reading_is_none(either_store: Path) -> None:
    store = Store()
    watcher = StoreChanges(store)
    wait_until(lambda: stays(watcher), "a store that nobody changes")
    before = watcher.sign()
    for name in "abc":
        with store.reading() as session:
            session.get(Lock, name)
        assert watcher.sign() == before
        write(name)
        wait_until(lambda before=before: watcher.sign() != before, "the change")
        wait_until(lambda: stays(watcher), "a store that nobody changes")
        before = watcher.sign()


def test_without_notifications_rows_count_as_changed(
    on_postgresql: Postgres, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = StoreChanges(Store())
    wait_until(lambda: stays(watcher), "notifications")
    before = watcher.sign()
    on_postgresql.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'NOTIFY shoal%'")
    wait_until(lambda: not stays(watcher), "the end of the connection")
    monkeypatch.setattr(changes, "_LISTEN_AGAIN_S", 0.0)
    watcher._listen_at = 0.0
    wait_until(lambda: stays(watcher), "notifications")
    assert watcher.sign() != before


def test_a_connection_that_passes_no_notifications_on_is_not_trusted(
    on_postgresql: Postgres, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PgBouncer accepts LISTEN, and may send the next transaction to another session."""
    monkeypatch.setattr(changes, "_PROOF_S", 0.01)

    def passed_on(_connection: object, _cursor: object, statement: str, parameters: object, *_: object) -> object:
        return statement.replace("LISTEN shoal", "LISTEN another"), parameters

    engine = Store()._engine
    event.listen(engine, "before_cursor_execute", passed_on, retval=True)
    watcher = StoreChanges(Store())
    assert not stays(watcher)
    assert not stays(watcher)
