"""What is PostgreSQL's alone: what goes wrong between a process and its server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback

import pytest
from sqlalchemy import text

from shoal.errors import StoreError
from shoal.state import Store, databases
from shoal.state.home import lock_file
from shoal.state.private_folders import runtime_root
from shoal.state.schema import Lock
from tests.support.postgres import PASSWORD, Postgres
from tests.support.waiting import wait_until


def refusal(url: str) -> str:
    """What a store says that cannot be opened."""
    with pytest.raises(StoreError) as caught:
        Store(url)
    shown = "".join(traceback.format_exception(caught.value))
    assert PASSWORD not in shown
    return str(caught.value)


def test_a_wrong_password_a_missing_database_and_a_missing_user_are_named(on_postgresql):
    server: Postgres = on_postgresql
    assert "check user and password" in refusal(server.url("postgres", password="mistaken"))
    assert "check user and password" in refusal(server.url("postgres", user="nobody-here"))
    said = refusal(server.url("nowhere"))
    assert 'database "nowhere" does not exist' in said and "createdb" in said


def test_a_server_that_is_not_there_is_named():
    url = f"postgresql+psycopg://shoal:{PASSWORD}@127.0.0.1:1/shoal"
    said = refusal(url)
    assert "postgresql+psycopg://127.0.0.1:1/shoal" in said and "no server listens at this" in said
    assert "no server listens at this" in refusal(f"postgresql://shoal:{PASSWORD}@/shoal?host=/nowhere")


def test_a_user_without_rights_is_told_which(on_postgresql):
    server: Postgres = on_postgresql
    server.run("CREATE USER guest PASSWORD 'not-a-secret'")
    try:
        assert "make it the owner of the database" in refusal(
            os.environ["SHOAL_STATE_URL"].replace("shoal:", "guest:", 1)
        )
    finally:
        server.run("DROP USER guest")


def test_a_standby_is_named(on_postgresql):
    store = Store()
    on_postgresql.become_standby()
    try:
        with store.reading() as session:
            assert session.get(Lock, "any") is None
        with pytest.raises(StoreError, match="standby: use the primary"), store.transaction() as session:
            session.get(Lock, "any")
    finally:
        on_postgresql.become_primary()


def test_a_missing_driver_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    databases.engine.cache_clear()
    assert 'pip install "shoal[postgres]"' in refusal("postgresql://localhost/shoal")
    databases.engine.cache_clear()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "is not a valid URL"),
        ("mysql://localhost/shoal", "PostgreSQL or SQLite"),
        ("sqlite:///state.db", "has to be absolute"),
        ("sqlite://", "has to be absolute"),
    ],
)
def test_what_is_no_store_is_refused(url, said):
    assert said in refusal(url)


def test_a_server_that_comes_back_is_used_again(on_postgresql):
    store = Store()
    on_postgresql.stop()
    try:
        with pytest.raises(StoreError, match="no server listens at this"), store.transaction() as session:
            session.get(Lock, "any")
        with pytest.raises(StoreError, match="no server listens at this"), store.reading() as session:
            session.get(Lock, "any")
    finally:
        on_postgresql.start()
    with store.transaction() as session:
        session.add(Lock(name="any", holder="test", expires_at=0))
    with store.reading() as session:
        assert session.get(Lock, "any") is not None


def test_a_server_that_goes_in_the_middle_of_a_transaction_leaves_nothing_of_it(on_postgresql):
    store = Store()

    def interrupted() -> None:
        with store.transaction() as session:
            session.add(Lock(name="half", holder="test", expires_at=0))
            session.flush()
            on_postgresql.stop()

    try:
        with pytest.raises(StoreError, match="try again when it runs again"):
            interrupted()
    finally:
        on_postgresql.start()
    with store.reading() as session:
        assert session.get(Lock, "half") is None


def test_a_forked_child_has_connections_of_its_own(on_postgresql):
    store = Store()
    with store.transaction() as session:
        session.add(Lock(name="counter", holder="test", expires_at=0))
        mine = session.execute(text("SELECT pg_backend_pid()")).scalar()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with store.transaction() as session:
                session.get_one(Lock, "counter").expires_at += 1
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with store.transaction() as session:
        assert session.execute(text("SELECT pg_backend_pid()")).scalar() == mine  # the child did not end it
        assert session.get_one(Lock, "counter").expires_at == 1


PAUSED = """
import os, signal
from shoal.state import Store, databases
from shoal.state.schema import Lock
databases._BEGIN_WRITING = databases._BEGIN_WRITING.replace("15s", "1s")
with Store().transaction() as session:
    session.add(Lock(name="paused", holder="test", expires_at=0))
    session.flush()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_writer_that_is_paused_loses_its_transaction_and_hears_it(on_postgresql):
    store = Store()
    paused = subprocess.Popen([sys.executable, "-c", PAUSED], stderr=subprocess.PIPE, text=True)
    try:
        os.waitid(os.P_PID, paused.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        with store.transaction() as session:  # waits for it, not for ever
            session.add(Lock(name="other", holder="test", expires_at=0))
        paused.send_signal(signal.SIGCONT)
        _, said = paused.communicate(timeout=60)
    finally:
        paused.kill()
        paused.wait()
    assert "this process was paused during a write transaction" in said or "closed the connection" in said
    with store.reading() as session:
        assert session.get(Lock, "other") is not None
        assert session.get(Lock, "paused") is None


def test_a_writer_that_hangs_is_named_to_those_who_wait(on_postgresql, monkeypatch):
    store = Store()
    monkeypatch.setattr(databases, "_BEGIN_WRITING", databases._BEGIN_WRITING.replace("120s", "200ms"))
    name = os.environ["SHOAL_STATE_URL"].rpartition("/")[2]
    import psycopg

    with psycopg.connect(on_postgresql.url(name).replace("+psycopg", "")) as other:
        other.execute(f"SELECT pg_advisory_xact_lock({databases._WRITERS_LOCK})")
        with pytest.raises(StoreError, match="pg_stat_activity"), store.transaction() as session:
            session.get(Lock, "any")
        with store.reading() as session:  # looks wait for nobody
            assert session.get(Lock, "any") is None


def test_a_look_writes_nothing(on_postgresql):
    def write() -> None:
        with Store().reading() as session:
            session.add(Lock(name="any", holder="test", expires_at=0))
            session.flush()

    with pytest.raises(StoreError, match="read-only"):
        write()


def test_the_stores_of_one_home_do_not_take_each_others_nodes_for_leftovers(fresh_home, monkeypatch):
    """A shell without the URL that sweeps the same home must not end what the store in PostgreSQL knows of."""
    seen = set()
    for url in (
        None,
        f"sqlite:///{fresh_home}/state.db",
        "postgresql://one:secret@db.example/shoal",
        "postgresql+psycopg://two@db.example/shoal",
        "postgresql+psycopg://db.example/other",
    ):
        monkeypatch.delenv("SHOAL_STATE_URL", raising=False)
        if url:
            monkeypatch.setenv("SHOAL_STATE_URL", url)
        seen.add((runtime_root(), lock_file("reconciler")))
    assert len(seen) == len({root for root, _ in seen}) == 3


def test_idle_connections_of_a_process_are_one(on_postgresql):
    store = Store()
    name = os.environ["SHOAL_STATE_URL"].rpartition("/")[2]
    with store.transaction() as session, store.reading() as look:
        assert look.get(Lock, "any") is None
        session.add(Lock(name="any", holder="test", expires_at=0))
    count = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'shoal'"
    wait_until(lambda: on_postgresql.run(count) == [(1,)], "one connection")
