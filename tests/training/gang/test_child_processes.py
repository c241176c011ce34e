"""A gang whose workers are processes of this machine, without Ray: the same gang in every other respect."""

from __future__ import annotations

import atexit
import contextlib
import gzip
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import psutil
import pytest

from shoal.errors import CapacityError, DataError, TrainingError, WorkerLostError
from shoal.training.gang import child_processes
from shoal.training.gang import gang as gang_module
from shoal.training.gang.child import fork_template
from shoal.training.gang.child_processes import import_ahead, use_template
from shoal.training.gang.connection import EventKind
from shoal.training.gang.gang import Gang, end_gangs, shared_gang
from shoal.training.gang.placement import GangShape
from shoal.training.gang.worker import Failure
from shoal.training.host.memory import OomKills
from shoal.training.reporting import gang_context
from shoal.training.timeouts import FURTHER_ERRORS_S
from shoal.training.xgboost.tracker import Tracker
from tests.support.two_node_cluster import assert_ended
from tests.support.waiting import wait_until
from tests.support.without_ray import nodes_without_ray

TWO = GangShape(2, 1.0)


NEW_PROCESSES = pytest.param("new processes", marks=pytest.mark.processes)


@pytest.fixture(autouse=True, params=[NEW_PROCESSES, "forks of a template"])
def forked(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the workers are forked from a template."""
    end_gangs()
    with nodes_without_ray(2):
        forked = request.param == "forks of a template"
        if forked:
            use_template(fork_template()[0])
            import_ahead(lambda: TWO, ["shoal.training.xgboost.worker"])
        yield forked
        end_gangs()
        use_template(None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """All lines that this process has printed for workers. Output that is written while pytest reads what it has
    captured may be lost, so tests that wait for a line must not read it again and again."""
    lines: list[str] = []
    for module in (child_processes, gang_module):
        monkeypatch.setattr(module, "say", lines.append)
    return lambda: "\n".join(lines)


def where_am_i(*args: Any) -> tuple[Any, ...]:
    context = gang_context()
    print("printed by", context.rank)
    return context.rank, context.world_size, context.local_world_size, os.getcwd(), os.environ.get("SECRET"), args


def leave_something() -> list[str]:
    """Look for what an earlier worker has left, and leave it for the next one."""
    import random

    found = [name for name in ("LEFT",) if name in os.environ] + [name for name in ("left",) if hasattr(np, name)]
    os.environ["LEFT"] = np.left = "by an earlier worker"  # type: ignore[attr-defined]
    return [*found, str(random.random()), str(np.random.random())]


def leave_to_the_interpreter(folder: str) -> None:
    """Leave open files, an exit handler, a finalizer and a thread, which the interpreter completes at its end."""
    import atexit
    import builtins
    import gzip
    import multiprocessing
    import weakref
    import zipfile

    global archive
    here = Path(folder)
    table = (here / "table.csv").open("w")
    compressed = gzip.open(here / "rows.gz", "wt")  # noqa: SIM115
    table.write("1,0.5\n")
    compressed.write("row\n")
    builtins.left = [table, compressed, atexit]  # type: ignore[attr-defined]
    archive = zipfile.ZipFile(here / "rows.zip", "w")
    archive.writestr("rows", "row\n")
    weakref.finalize(table, (here / "finalized").write_text, "yes")
    atexit.register((here / "summary").write_text, "written")
    threading.Timer(0.2, (here / "thread").write_text, ["done"]).start()
    multiprocessing.get_context("fork").Process(target=write_later, args=(here / "process",)).start()


def write_later(path: Path) -> None:
    threading.Event().wait(0.2)
    path.write_text("done")


def wait_in_a_thread() -> None:
    threading.Thread(target=threading.Event().wait).start()


def fork_and_return(folder: str) -> int:
    """Return in a forked process, too, which cannot report anything before."""
    if os.fork():
        os.wait()
    else:
        gang_context().log("said by the fork")
        with contextlib.suppress(TrainingError):
            gang_context().note({"metrics": {"loss": 0.0}})
            Path(folder, "noted").touch()
    return os.getpid()


def fork_and_die(file: str) -> None:
    """Leave a process that was forked without exec when rank 1 is killed."""
    if gang_context().rank == 1 and (pid := os.fork()):
        Path(file).write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def raise_in_rank_1(error: BaseException) -> None:
    if gang_context().rank == 1:
        raise error
    threading.Event().wait()


def wait_in_rank_1(file: str) -> int:
    rank = gang_context().rank
    while rank == 1 and not os.path.exists(file):
        threading.Event().wait(0.05)
    return rank


class OddError(DataError):
    """A user's subclass of an error, with a constructor of its own."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        return OddError, (7, "null label")


def note_and_fail() -> None:
    if gang_context().rank == 0:
        gang_context().note({"rounds": 12})
        raise ValueError("round 12")


def fail_in_rank_1() -> None:
    if gang_context().rank == 1:
        raise OddError(7, "null label")
    threading.Event().wait()


class RowError(DataError):
    """Error that pickle cannot create again, because its constructor needs more than the message."""

    def __init__(self, row: int, column: str) -> None:
        super().__init__(f"row {row} of {column} is corrupt")


def fail_at_a_row() -> None:
    raise RowError(7, "price")


def return_an_error() -> RowError:
    return RowError(7, "price")


class Exit:
    """Object that ends the process in which it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


def test_workers_have_ranks_folder_and_environment_and_what_they_print_is_printed_here(
    tmp_path: Path, said: Callable[[], str], forked: bool
) -> None:
    with shared_gang(TWO, env={"PWD": str(tmp_path), "SECRET": "s3cret"}) as gang:
        results = gang.run(where_am_i, [("x",), ("y",)])
        pids = [worker.pid for worker in gang.workers]
        assert gang.run(os.getpid, [(), ()]) == pids
    here = str(tmp_path)
    assert results == [(0, 2, 2, here, "s3cret", ("x",)), (1, 2, 2, here, "s3cret", ("y",))]
    assert "SECRET" not in os.environ
    parents = {psutil.Process(pid).ppid() for pid in pids}
    assert (parents == {os.getpid()}) is not forked
    end_gangs()
    assert_ended(pids)
    lines = [f"(worker pid={pid}) printed by {rank}" for rank, pid in enumerate(pids)]
    wait_until(lambda: all(line in said() for line in lines), "the lines of both workers")


def test_nothing_of_a_worker_is_visible_in_another() -> None:
    seen = []
    for _ in range(2):
        with shared_gang(TWO) as gang:
            seen += gang.run(leave_something, [(), ()])
        end_gangs()
    assert [len(each) for each in seen] == [2] * 4
    assert len({number for each in seen for number in each}) == 8


def test_the_tracker_of_xgboost_is_forked_from_the_template_too(forked: bool) -> None:
    tracker = Tracker("127.0.0.1", 2, print)
    try:
        assert tracker.begin()["dmlc_tracker_uri"] == "127.0.0.1"
        assert (psutil.Process(tracker.pid).ppid() == os.getpid()) is not forked
    finally:
        tracker.close()
    assert_ended([tracker.pid])


def test_a_worker_starts_although_the_template_was_killed(forked: bool) -> None:
    if not forked:
        return
    with shared_gang(TWO) as gang:
        [template] = {psutil.Process(worker.pid).ppid() for worker in gang.workers}
        assert template != os.getpid(), "the template has ended, and this process has started the workers"
        os.kill(template, signal.SIGKILL)
        assert len(set(gang.run(os.getpid, [(), ()]))) == 2
    end_gangs()
    with shared_gang(TWO) as gang:
        assert len(set(gang.run(os.getpid, [(), ()]))) == 2


def test_failed_fork_of_a_worker_ends_the_gang_with_the_reason_and_leaves_the_template(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_forks = tmp_path / "no-forks"

    def unless_full(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **options: Any) -> Any:
            if no_forks.exists():
                raise BlockingIOError(11, "no room")
            return start(*args, **options)

        return started

    monkeypatch.setattr(os, "fork", unless_full(os.fork))
    monkeypatch.setattr(subprocess, "Popen", unless_full(subprocess.Popen))
    if forked:
        use_template(fork_template()[0])
        import_ahead(lambda: TWO, [])
    with shared_gang(TWO) as gang:
        parents = {psutil.Process(worker.pid).ppid() for worker in gang.workers}
    end_gangs()
    no_forks.touch()
    with pytest.raises(WorkerLostError, match=r"rank 0 could not be started, .*another process: \[Errno 11\] no room"):
        Gang.start(TWO)
    assert fork_template() is None
    no_forks.unlink()
    with shared_gang(TWO) as gang:
        assert {psutil.Process(worker.pid).ppid() for worker in gang.workers} == parents


def test_the_first_cause_is_raised_and_the_gang_ends() -> None:
    said = r"OddError: 7: null label \[rank 1 \(node here, pid \d+\)\]"
    with pytest.raises(DataError, match=said), shared_gang(TWO) as gang:
        gang.run(fail_in_rank_1, [(), ()])
    assert gang.ended
    assert_ended([worker.pid for worker in gang.workers])


def test_notes_that_arrive_after_the_error_of_their_worker_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[Any] = []
    receive = Gang._on_event

    def receive_after_the_error(gang: Gang, rank: int, kind: EventKind, text: str) -> None:
        if kind is EventKind.NOTE:
            # Longer than the gang waits for further errors.
            assert gang._failed.wait(60)
            threading.Event().wait(2 * FURTHER_ERRORS_S)
        receive(gang, rank, kind, text)

    monkeypatch.setattr(Gang, "_on_event", receive_after_the_error)
    with pytest.raises(TrainingError, match="round 12"), shared_gang(TWO) as gang:
        gang.run(note_and_fail, [(), ()], on_note=lambda *note: notes.append(note))
    assert notes == [(0, {"rounds": 12})]


@pytest.mark.parametrize(("number", "lacks_memory"), [(signal.SIGKILL, True), (signal.SIGABRT, False)])
def test_a_worker_that_was_killed_is_told_by_the_next_run(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, lacks_memory: bool
) -> None:
    with shared_gang(TWO) as gang:
        os.kill(gang.workers[1].pid, number)
        wait_until(lambda: not gang.sound, "the driver to miss the worker")
        monkeypatch.setattr(
            OomKills, "told", lambda _: "the kernel has killed 2 processes of the driver's container for lack of memory"
        )
        expected = rf"rank 1 .* was killed by {number.name}\..* killed 2 processes .* memory"
        with pytest.raises(WorkerLostError, match=expected) as info:
            gang.run(os.getpid, [(), ()])
    assert info.value.out_of_memory is lacks_memory
    assert_ended([worker.pid for worker in gang.workers])


def test_a_fork_of_a_worker_ends_when_it_returns_from_the_function_and_sends_nothing_in_the_name_of_the_worker(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    notes: list[Any] = []
    with shared_gang(TWO) as gang:
        pids = [worker.pid for worker in gang.workers]
        assert gang.run(fork_and_return, [(str(tmp_path),)] * 2, on_note=lambda *note: notes.append(note)) == pids
        assert gang.run(os.getpid, [(), ()]) == pids
    assert not notes
    assert not list(tmp_path.iterdir())
    lines = [f"(worker pid={pid}) {text}" for pid in pids for text in ("said by the fork", "the process ")]
    wait_until(lambda: all(line in said() for line in lines), "the lines of the forks")
    assert "because it returned from the user's function" in said()


def test_a_fork_does_not_hide_the_end_of_its_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pid"
    try:
        with pytest.raises(WorkerLostError, match=r"rank 1 .* was killed by SIGKILL"), shared_gang(TWO) as gang:
            gang.run(fork_and_die, [(str(file),)] * 2)
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)
    assert "cannot be reached" not in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_that_ends_processes_is_an_error_of_the_function(error: BaseException) -> None:
    expected = f"rank 1 .* failed: {type(error).__name__}"
    with pytest.raises(TrainingError, match=expected) as info, shared_gang(TWO) as gang:
        gang.run(raise_in_rank_1, [(error,), (error,)])
    assert not isinstance(info.value, WorkerLostError)


def test_ranks_that_return_long_before_others_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []

    def end_the_wait(text: str) -> None:
        said.append(text)
        (tmp_path / "said").touch()

    monkeypatch.setattr(gang_module.timeouts, "UNEVEN_RETURN_S", 0.1)
    monkeypatch.setattr(gang_module, "say", end_the_wait)
    with shared_gang(TWO) as gang:
        assert gang.run(wait_in_rank_1, [(str(tmp_path / "said"),)] * 2, timeout=60) == [0, 1]
    [message] = [text for text in said if "uneven batches?" in text]
    assert message.startswith("rank 0 returned 0 s ago, but rank 1 did not")


def test_the_notes_of_all_ranks_that_failed_are_in_the_error() -> None:
    gang = Gang(TWO)
    for rank in (1, 0):
        gang._answered(rank, Failure("ValueError: x", f"traceback of rank {rank}", None))
    first = gang._next(0)
    assert isinstance(first, gang_module._Cause)
    assert [note.splitlines()[1] for note in gang._first_cause(first, set(), None).__notes__] == [
        "traceback of rank 1",
        "traceback of rank 0",
    ]


def contents(folder: Path) -> dict[str, bytes]:
    read = {".gz": lambda file: gzip.decompress(file.read_bytes()), ".zip": lambda file: ZipFile(file).read("rows")}
    return {file.name: read.get(file.suffix, Path.read_bytes)(file) for file in sorted(folder.iterdir())}


def test_workers_end_as_an_interpreter_ends_but_run_no_exit_handler_of_their_parent(
    tmp_path: Path, forked: bool
) -> None:
    folders = [tmp_path / name for name in ("plain", "0", "1")]
    for folder in folders:
        folder.mkdir()
    source = f"from tests.training.gang.test_child_processes import *; leave_to_the_interpreter({str(folders[0])!r})"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)
    inherited = tmp_path / "inherited"
    atexit.register(inherited.touch)
    if forked:
        use_template(fork_template()[0])
        import_ahead(lambda: TWO, [])
    gang = Gang.start(TWO)
    gang.run(leave_to_the_interpreter, [(str(folder),) for folder in folders[1:]])
    gang.finish()
    atexit.unregister(inherited.touch)
    assert contents(folders[1]) == contents(folders[2]) == contents(folders[0])
    left = {"table.csv", "rows.gz", "rows.zip", "summary", "thread", "finalized", "process"}
    assert set(contents(folders[0])) == left
    assert not inherited.exists()
    assert_ended([worker.pid for worker in gang.workers])


def test_a_worker_whose_thread_never_ends_is_killed_after_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    gang = Gang.start(TWO)
    gang.run(wait_in_a_thread, [(), ()])
    gang.finish(timeout=0.5)
    assert "did not end within 0.5 s" in capsys.readouterr().out
    assert_ended([worker.pid for worker in gang.workers])


@pytest.mark.parametrize("function", [threading.Lock, return_an_error])
def test_a_result_that_cannot_be_pickled_or_unpickled(function: Callable[[], Any]) -> None:
    with pytest.raises(TrainingError, match="pickle") as info, shared_gang(TWO) as gang:
        gang.run(function, [(), ()])
    assert not isinstance(info.value, WorkerLostError)


@pytest.mark.parametrize(("function", "args"), [(Exit, ()), (print, (Exit(),))], ids=["result", "argument"])
def test_an_object_that_ends_processes_when_it_is_unpickled_is_named(function: Any, args: tuple[Any, ...]) -> None:
    with pytest.raises(TrainingError, match=r"rank [01] .* failed: .*SystemExit: 3") as info, shared_gang(TWO) as gang:
        gang.run(function, [args, ()], timeout=20)
    assert not isinstance(info.value, WorkerLostError)


def test_an_error_that_cannot_be_unpickled_keeps_its_message_and_traceback() -> None:
    expected = r"RowError: row 7 of price is corrupt \[rank"
    with pytest.raises(DataError, match=expected) as info, shared_gang(TWO) as gang:
        gang.run(fail_at_a_row, [(), ()])
    assert "in fail_at_a_row" in info.value.__notes__[0]


@pytest.mark.parametrize("shape", [GangShape(3, 1.0), GangShape(1, 3.0), GangShape(1, 1.0, gpus_per_worker=1)], ids=str)
def test_what_does_not_fit_is_refused(shape: GangShape) -> None:
    with pytest.raises(CapacityError, match="do not fit on this pool"):
        Gang.start(shape)


def test_a_killed_driver_leaves_no_process(forked: bool, tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from shoal.node_register import NodeRegister
from shoal.training import cluster
from tests.support.without_ray import registered
from shoal.training.gang.placement import GangShape
from shoal.training.gang.gang import Gang
from shoal.training.gang.connection import EventKind
from shoal.secrets.known_secrets import KnownSecrets
from shoal.secrets.redaction import hiding
from shoal.training.gang import child_processes
from shoal.training.gang.child import fork_template
cluster.use_register(NodeRegister(Path(sys.argv[2])))
registration = registered(cluster.register(), 0, 2)
shape = GangShape(2, 1.0)
if sys.argv[1] == "True":
    child_processes.use_template(fork_template()[0])
    child_processes.import_ahead(lambda: shape, [])
gang = Gang.start(shape)
import psutil
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script, str(forked), str(tmp_path / "nodes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == (3 if forked else 2)
    assert_ended(pids)
