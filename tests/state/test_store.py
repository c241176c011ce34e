from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import close_all_sessions

from shoal.errors import StoreError
from shoal.state import Store, databases
from shoal.state.databases import SCHEMA_VERSION
from shoal.state.home import home
from shoal.state.schema import Lock


@pytest.fixture
def fresh_home(empty_home):
    """A home without a store: these tests are about how one is made."""
    return empty_home


def in_processes(count: int, act: Callable[[], object]) -> None:
    """Do the same in many processes at once, none of which has opened the store before."""
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(count)

    def begin() -> None:
        together.wait(60)
        act()

    processes = [fork.Process(target=begin) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * count


def add_twenty() -> None:
    store = Store()
    for _ in range(20):
        with store.transaction() as session:
            session.get_one(Lock, "counter").expires_at += 1


@pytest.mark.processes
def test_no_update_of_many_processes_is_lost(either_store):
    """12 processes x 20 read-modify-writes: SQLAlchemy's default loses 220 of the 240 in silence."""
    with Store().transaction() as session:
        session.add(Lock(name="counter", holder="test", expires_at=0))
    in_processes(12, add_twenty)
    with Store().reading() as session:
        assert session.get_one(Lock, "counter").expires_at == 240


@pytest.mark.processes
def test_many_processes_make_one_database(either_store):
    in_processes(6, Store)


def test_a_new_file_that_another_connection_writes_is_switched_to_wal_later(fresh_home, monkeypatch):
    """SQLite does not wait here: it fails at once, as it does when many processes make one database."""
    other = sqlite3.connect(fresh_home / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waited = []

    def release(seconds: float) -> None:
        waited.append(seconds)
        other.close()

    # Only this module's clock is replaced: other threads of the test's process sleep too.
    monkeypatch.setattr(databases, "time", SimpleNamespace(monotonic=time.monotonic, sleep=release))
    with Store().reading() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
    assert len(waited) == 1


def test_a_transaction_that_raises_changes_nothing(either_store):
    store = Store()

    def fail() -> None:
        with store.transaction() as session:
            session.add(Lock(name="half", holder="test", expires_at=0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with store.reading() as session:
        assert session.get(Lock, "half") is None


def test_a_signal_waits_for_the_transaction(either_store):
    """Raised in the middle of it, an exception would leave the database locked while its traceback lives."""
    store = Store()
    reached = []

    def interrupted() -> None:
        with store.transaction() as session:
            os.kill(os.getpid(), signal.SIGINT)
            session.add(Lock(name="whole", holder="test", expires_at=0))
            reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["end"]
    with store.transaction() as session:
        assert session.get(Lock, "whole") is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["do_execute_no_params", "do_close"])
def test_an_interrupt_in_a_read_is_raised_as_it_is_and_not_logged(fresh_home, monkeypatch, caplog, moment):
    store = Store()

    def read() -> None:
        with store.reading() as session, monkeypatch.context() as patched:
            patched.setattr(session.get_bind().dialect, moment, interrupted)
            session.execute(text("SELECT 1"))
            session.close()

    with pytest.raises(KeyboardInterrupt):
        read()
    assert not [record for record in caplog.records if record.name.startswith("sqlalchemy")]


def test_an_error_while_an_interrupt_is_handled_is_told(fresh_home):
    store = Store()
    try:
        interrupted()
    except KeyboardInterrupt:
        with pytest.raises(StoreError, match="no such table"), store.reading() as session:
            session.execute(text("SELECT 1 FROM missing"))


def test_a_newer_database_is_refused(either_store):
    store = Store()
    with store.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"newer shoal .its schema is 9999, this version supports"):
        Store()
    assert SCHEMA_VERSION < "9999"


def test_a_corrupt_database_is_named(fresh_home):
    (fresh_home / "state.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match=r"state\.db .*move it away"):
        Store()


def test_a_home_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(StoreError, match=r"SHOAL_HOME .* cannot be created"):
        Store()


def test_the_home_is_private(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "new"))
    assert home().stat().st_mode & 0o777 == 0o700


@pytest.fixture
def elsewhere(fresh_home, tmp_path, monkeypatch) -> Path:
    """A SQLite file outside of `$SHOAL_HOME`, in a folder that other users can enter."""
    folder = tmp_path / "elsewhere"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("SHOAL_STATE_URL", f"sqlite:///{folder}/state.db")
    return folder / "state.db"


def modes(file: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in file.parent.glob(f"{file.name}*")}


def test_no_other_user_can_read_a_new_store(elsewhere):
    with Store().reading() as session:
        session.get(Lock, "any")
        made = modes(elsewhere)
    assert made == dict.fromkeys(["state.db", "state.db-reserve", "state.db-shm", "state.db-wal"], 0o600)


def test_a_store_that_others_could_read_is_private_after_it_was_opened(elsewhere, caplog):
    Store()
    elsewhere.chmod(0o644)
    Store(migrate=False)
    assert modes(elsewhere)["state.db"] == 0o600
    assert "had mode 0644, so other users could read it" in caplog.text


def test_a_store_in_the_home_is_made_private_without_a_warning(fresh_home, caplog):
    Store()
    (fresh_home / "state.db").chmod(0o666)
    Store()
    assert modes(fresh_home / "state.db")["state.db"] == 0o600
    assert "its mode is now 0600" not in caplog.text


@pytest.mark.parametrize(
    ("mode", "says"), [(0o1777, r"lies in .*elsewhere, which has mode 1777"), (0o777, "mode 0777")]
)
def test_a_store_in_a_folder_of_all_users_is_refused(elsewhere, mode, says):
    elsewhere.parent.chmod(mode)
    with pytest.raises(StoreError, match=rf"{says}: any user can put files there. Set SHOAL_STATE_URL"):
        Store()
    assert not elsewhere.exists()


def test_a_store_that_any_user_may_have_changed_is_refused(elsewhere):
    elsewhere.touch()
    elsewhere.chmod(0o666)
    with pytest.raises(StoreError, match=r"has mode 0666: any user may have changed it. .*chmod 600"):
        Store()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [".", "state.db", "state.db-wal", "state.db-journal"])
def test_a_store_with_a_file_or_folder_of_another_user_is_refused(elsewhere, name):
    path = elsewhere.parent / name
    if name != ".":
        path.touch(mode=0o600)
    os.chown(path, 65534, -1)
    with pytest.raises(StoreError, match="belongs to user 65534"):
        Store()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_that_is_reached_by_a_link_of_another_user_is_refused(elsewhere, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(elsewhere.parent)
    monkeypatch.setenv("SHOAL_STATE_URL", f"sqlite:///{link}/state.db")
    Store()
    os.chown(link, 65534, -1, follow_symlinks=False)
    with pytest.raises(StoreError, match=r"is reached by the symlink .*link of user 65534"):
        Store()


_ON_A_FULL_DISK = """
import os, sys
from shoal.state import Store
from shoal.state.schema import Lock

Store()
try:
    with open("filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
except OSError as error:
    print(error.strerror)
for _ in range(3):  # each with a connection of its own
    with Store().reading() as session:
        print(session.get(Lock, "any"))
os.unlink("filler")
Store()
print(os.stat("home/state.db-reserve").st_size)
"""


def test_a_store_on_a_full_disk_can_be_read(tmp_path):
    """SQLite needs disk space even to read. The disk is a tmpfs that only the processes of this test see."""
    private = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else []), "sh", "-c"]
    mount = "mount -t tmpfs -o size=2m,mode=700 tmpfs ."
    if subprocess.run([*private, mount], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    script = f'{mount} && cd "$PWD" && SHOAL_HOME=$PWD/home exec "$0" -c "$1"'
    done = subprocess.run(
        [*private, script, sys.executable, _ON_A_FULL_DISK], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["No space left on device", "None", "None", "None", str(256 * 2**10)], (
        done.stderr
    )


def test_a_look_sees_one_instant(either_store):
    """What another process writes between two of its questions belongs to the next look."""
    store = Store()
    with store.transaction() as session:
        session.add(Lock(name="counter", holder="test", expires_at=0))
    with store.reading() as look:
        assert look.get_one(Lock, "counter").expires_at == 0
        with store.transaction() as session:
            session.get_one(Lock, "counter").expires_at = 1
        look.expire_all()
        assert look.get_one(Lock, "counter").expires_at == 0
    with store.reading() as look:
        assert look.get_one(Lock, "counter").expires_at == 1


def test_tables_are_created_completely_or_not_at_all(either_store, monkeypatch):
    from shoal.state import schema

    def fail(connection) -> None:
        create_tables(connection)
        raise OperationalError("DDL", {}, Exception("cut off"))

    create_tables = schema.create_tables
    with monkeypatch.context() as patch:
        patch.setattr(schema, "create_tables", fail)
        with pytest.raises(StoreError, match="cut off"):
            Store()
    store = Store(migrate=False)
    with store.reading() as session:
        assert inspect(session.connection()).get_table_names() == []
    with Store().reading() as session:
        assert session.get(Lock, "any") is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:cAnArY@localhost:notaport/db", "port"),
        ("postgresql://me:cAnArY@cAnArY@localhost/db", "%40"),
        ("postgresql://[::1/cAnArY", "not a valid URL"),
        ("http://[::1", "not a valid URL"),
        ("mysql://me:12/cAnArY@localhost/db", "mysql"),
        ("sqlite:///relative.db?password=cAnArY", "absolute"),
        ("postgresql://localhost:1/db?password=cAnArY", r"password=\*\*\*.*cannot be used"),
        ("postgresql://me:12/cAn#ArY@localhost:1/db?sslpassword=cAnArY", "cannot be used"),
    ],
)
def test_a_wrong_state_url_is_refused_without_its_password(
    url: str, said: str, fresh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_STATE_URL", url)

    with pytest.raises(StoreError, match=said) as caught:
        Store()

    shown = "".join(traceback.format_exception(caught.value))
    assert "cAnArY" not in shown
    assert "cAn#ArY" not in shown


def test_a_session_is_not_closed_by_other_threads(either_store):
    """Airflow's exit handler closes the sessions of all libraries and threads."""
    store, writes, closed = Store(), threading.Event(), threading.Event()

    def write() -> None:
        with store.transaction() as session:
            session.add(Lock(name="one", holder="test", expires_at=0))
            session.flush()
            writes.set()
            closed.wait(60)
            session.add(Lock(name="two", holder="test", expires_at=0))

    thread = threading.Thread(target=write)
    thread.start()
    assert writes.wait(60)
    close_all_sessions()
    closed.set()
    thread.join()

    with store.reading() as session:
        assert {lock.name for lock in session.query(Lock)} == {"one", "two"}
