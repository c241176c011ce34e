"""What a pool is built on fails: each time a clear error, and the pool unchanged or recovered."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from shoal.errors import ShoalError, StoreError
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import reconcile, sweep
from shoal.state import Store
from shoal.state.schema import Operation, OperationState
from tests.support import ROOT
from tests.support.pool_processes import folders, node_rows
from tests.support.waiting import wait_until

SCALE = """
from shoal.pool.options.local import LocalOptions
LocalOptions.backend_class = "tests.support.tiny_backend:TinyBackend"
from shoal.pool import reconciling
from shoal.pool.api import ComputePool
reconciling.ensure_running = lambda: None
from shoal.errors import ShoalError
try:
    print("scaled", ComputePool("tiny").scale(3, options={"rollback_after_seconds": 60}))
except ShoalError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4").up()


def in_namespaces(prepare: str, *kinds: str, first: str = "") -> str:
    """Scale to 3 in a process with namespaces of its own, prepared by a shell script and `first`; what it said."""
    if os.getuid() != 0 or subprocess.run(["unshare", *kinds, "true"], capture_output=True).returncode:
        pytest.skip("namespaces cannot be made here (needs root)")
    done = subprocess.run(
        ["unshare", *kinds, "sh", "-ec", f'{prepare}\nexec "$@"', "sh", sys.executable, "-c", first + SCALE],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def unchanged(pool: ComputePool, before: set[ProcessId]) -> None:
    """It has the nodes that it had, nobody works towards others, and it still does what it is asked to."""
    assert standing() == before and still(before)
    assert pool.describe().target == len(pool.get_nodes()) == 1
    assert open_operations() == 0
    assert sweep(Store()) == []
    assert pool.scale(2)


def standing() -> set[ProcessId]:
    """The supervisors of the nodes there are."""
    return {ProcessId.from_json(node.supervisor) for node in node_rows() if node.supervisor}


def still(supervisors: set[ProcessId]) -> bool:
    """Whether they all run, whatever the store has to say."""
    return all(supervisor.alive() for supervisor in supervisors)


def open_operations() -> int:
    with Store().reading() as session:
        return session.query(Operation).filter(Operation.state == OperationState.OPEN).count()


def test_a_read_only_home(up):
    """Not by its mode, which root does not heed, and in the acting process alone: its nodes write their logs."""
    before = standing()
    home = os.environ["SHOAL_HOME"]
    said = in_namespaces(f"mount --bind {home} {home}\nmount -o remount,bind,ro {home}", "--mount")
    assert said == f"StoreError SHOAL_HOME {home} is not writable. Set SHOAL_HOME to a folder to which you can write\n"
    unchanged(up, before)


@pytest.fixture
def small_home(fresh_home, request):
    """The home on a small disk of its own."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(fresh_home)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (needs root)")
    try:
        yield fresh_home
    finally:
        # Lazily: a log that the last supervisor still writes would keep it busy.
        subprocess.run(["umount", "--lazy", str(fresh_home)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room at all on a file system."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as sink:
        for size in (65536, 4096, 1):
            try:
                while True:
                    sink.write(b"x" * size)
            except OSError:
                continue
    return filler


def test_a_full_disk(small_home, tiny):
    pool = ComputePool("local://tiny?max_nodes=4").up()
    before = standing()
    filler = fill(small_home)
    with pytest.raises(StoreError, match="free some disk space"):
        pool.scale(3)
    with pytest.raises(StoreError, match="free some disk space"):
        ComputePool("local://other").up()
    assert still(before)  # their supervisors cannot ask, and keep their nodes
    filler.unlink()
    unchanged(pool, before)


def test_a_full_disk_with_the_store_elsewhere(on_postgresql, small_home, tiny):
    """A pool is recorded at home all the same."""
    pool = ComputePool("local://tiny?max_nodes=4").up()
    before = standing()
    filler = fill(small_home)
    with pytest.raises(StoreError, match=r"recorded.*No space left.*Free some disk space"):
        ComputePool("local://other").up()
    filler.unlink()
    unchanged(pool, before)


def test_a_disk_that_fills_up_in_the_middle(small_home, tiny):
    """What was accepted stands, and is carried on when there is room."""
    pool = ComputePool("local://tiny?max_nodes=4").up()
    pool.scale(3, is_async=True)
    reconcile(Store(), "tiny")
    wait_until(lambda: any(node.supervisor for node in node_rows() if not node.is_head), "a node on its way")
    filler = fill(small_home)
    with pytest.raises(StoreError, match="free some disk space"):
        pool.scale(4, is_async=True)
    filler.unlink()
    wait_until(lambda: reconcile(Store(), "tiny") and len(pool.get_nodes()) == 3, "3 nodes")
    wait_until(lambda: (sweep(Store()), open_operations() == 0)[1], "the operation's end")
    assert folders() == sorted(node.id for node in node_rows())


def test_a_corrupt_database(up, tiny):
    before = standing()
    good = (tiny / "state.db").read_bytes()
    (tiny / "state.db").write_bytes(b"\0" * 4096 + os.urandom(4096))
    with pytest.raises(StoreError, match=r"state\.db .*move it away"):
        ComputePool("tiny").scale(2)
    assert still(before)
    (tiny / "state.db").write_bytes(good)
    unchanged(up, before)


def test_a_newer_database(up):
    before = standing()
    with Store().transaction() as session:
        version = session.execute(text("SELECT version_num FROM alembic_version")).scalar()
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match=r"newer shoal .*upgrade shoal"):
        ComputePool("tiny").scale(2)
    with Store(migrate=False).transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :version"), {"version": version})
    unchanged(up, before)


def test_no_port_is_free(up):
    """Every node takes ports that the kernel chooses: here it has four, and all are taken."""
    before = standing()
    said = in_namespaces(
        "ip link set lo up\necho 40000 40003 > /proc/sys/net/ipv4/ip_local_port_range",
        "--net",
        first="import socket\ntaken = [socket.create_server(('127.0.0.1', 40000 + port)) for port in range(4)]",
    )

    assert said.startswith("ScaleError")
    assert "rolled back to 1" in said
    assert "Address already in use" in said
    unchanged(up, before)


def test_the_server_goes_in_the_middle_of_everything(on_postgresql, tiny, monkeypatch):
    """Nodes run, one is busy, an operation is open and waited for: all goes on when the server is back."""
    pool = ComputePool("local://tiny?max_nodes=4").up()
    monkeypatch.setattr("shoal.pool.waiting.STORE_PERIOD", 0.2)
    before = standing()
    outcome: list[object] = []

    def scale() -> None:
        try:
            outcome.append(ComputePool("tiny").scale(3))
        except ShoalError as error:
            outcome.append(error)

    waiting = threading.Thread(target=scale)
    waiting.start()
    wait_until(lambda: len(node_rows()) == 3, "its intents")
    on_postgresql.stop()
    try:
        with pytest.raises(StoreError, match="no server listens at this"):
            ComputePool("tiny").scale(1)
        (tiny / "busy-tiny-0").touch()
        log = tiny / "pools" / "tiny" / "logs"
        # A node that came up meanwhile, or wanted to say that it works, goes on trying to.
        wait_until(lambda: any("cannot be used" in path.read_text() for path in log.iterdir()), "a word in a log")
        assert still(before)
        assert waiting.is_alive()
    finally:
        on_postgresql.start()
    waiting.join(timeout=120)
    assert outcome == [True]
    assert still(before)
    assert len(pool.get_nodes()) == 3
    wait_until(lambda: any(node.busy for node in node_rows()), "the busy node's word")
    assert open_operations() == 0
    assert folders() == sorted(node.id for node in node_rows())


def test_a_server_that_stays_away_is_named_at_the_deadline(on_postgresql, tiny, monkeypatch):
    """The caller hears it; the operation is decided by whoever sweeps when the server is back."""
    pool = ComputePool("local://tiny?max_nodes=4").up()
    before = standing()
    monkeypatch.setattr("shoal.pool.waiting.STORE_PERIOD", 0.2)
    monkeypatch.setattr("shoal.pool.scaling_plan.SPAWN_GRACE", 60.0)
    monkeypatch.setattr("shoal.pool.waiting.WAIT_PERIOD", 0.1)
    stop = on_postgresql.stop
    reconciled = reconcile

    def then_gone(*args, **kwargs):
        changes = reconciled(*args, **kwargs)
        stop()
        return changes

    with monkeypatch.context() as patch:
        patch.setattr("shoal.pool.waiting.reconcile", then_gone)
        with pytest.raises(StoreError, match="no server listens at this") as caught:
            pool.scale(3, options={"rollback_after_seconds": 3.0})
    assert any("shoal sweep" in note for note in caught.value.__notes__)
    on_postgresql.start()

    def rolled_back() -> bool:
        sweep(Store())
        return open_operations() == 0 and len(node_rows()) == 1

    wait_until(rolled_back, "the rollback")
    unchanged(pool, before)
