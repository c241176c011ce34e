"""A gang whose workers are processes of this machine, without Ray: the same gang in every other respect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.errors import CapacityError, DataError, TrainingError, WorkerLostError
from shoal.training import cluster
from shoal.training.capacity import Node
from shoal.training.context import gang_context
from shoal.training.gang.child_processes import import_ahead, use_template
from shoal.training.gang.fork_template import fork_template
from shoal.training.gang.gang import Gang
from shoal.training.gang.placement import GangShape
from shoal.training.gang.reused_workers import end_gangs, shared_gang
from tests.support.two_node_cluster import assert_ended
from tests.support.waiting import wait_until

TWO = GangShape(2, 1.0)


@pytest.fixture(autouse=True, params=["new processes", "forks of a template"])
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the workers are forked from a template."""
    end_gangs()
    monkeypatch.setattr(cluster, "_this_machine", Node(name="here", cpus=2, gpus=0))
    forked = request.param == "forks of a template"
    if forked:
        use_template(fork_template())
        import_ahead(TWO, ["shoal.training.xgboost.worker"])
    yield forked
    end_gangs()
    use_template(None)


def where_am_i(*args: Any) -> tuple[Any, ...]:
    context = gang_context()
    print("printed by", context.rank)
    return context.rank, context.world_size, context.local_world_size, os.getcwd(), os.environ.get("SECRET"), args


def leave_something() -> list[str]:
    """Look for what an earlier worker has left, and leave it for the next one."""
    import random

    import numpy as np

    found = [name for name in ("LEFT",) if name in os.environ] + [name for name in ("left",) if hasattr(np, name)]
    os.environ["LEFT"] = np.left = "by an earlier worker"  # type: ignore[attr-defined]
    return [*found, str(random.random()), str(np.random.random())]


def fail_in_rank_1() -> None:
    if gang_context().rank == 1:
        raise DataError("null label")
    threading.Event().wait()


def test_workers_have_ranks_folder_and_environment_and_what_they_print_is_printed_here(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forked: bool
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
    said = ""

    def printed() -> bool:
        nonlocal said
        said += capfd.readouterr().out
        return all(f"(worker pid={pid}) printed by {rank}" in said for rank, pid in enumerate(pids))

    wait_until(printed, "the lines of both workers")


def test_nothing_of_a_worker_is_visible_in_another() -> None:
    seen = []
    for _ in range(2):
        with shared_gang(TWO) as gang:
            seen += gang.run(leave_something, [(), ()])
        end_gangs()
    assert [len(each) for each in seen] == [2] * 4
    assert len({number for each in seen for number in each}) == 8


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
        use_template(fork_template())
        import_ahead(TWO, [])
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
    with pytest.raises(DataError, match=r"null label \[rank 1 \(node here, pid \d+\)\]"), shared_gang(TWO) as gang:
        gang.run(fail_in_rank_1, [(), ()])
    assert gang.ended
    assert_ended([worker.pid for worker in gang.workers])


def test_a_worker_that_was_killed_is_told_by_the_next_run() -> None:
    with shared_gang(TWO) as gang:
        os.kill(gang.workers[1].pid, signal.SIGKILL)
        wait_until(lambda: not gang.sound, "the driver to miss the worker")
        with pytest.raises(WorkerLostError, match=r"rank 1 .* was lost"):
            gang.run(os.getpid, [(), ()])
    assert_ended([worker.pid for worker in gang.workers])


def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(TrainingError, match="pickle"), shared_gang(TWO) as gang:
        gang.run(threading.Lock, [(), ()])


@pytest.mark.parametrize("shape", [GangShape(3, 1.0), GangShape(1, 3.0), GangShape(1, 1.0, gpus_per_worker=1)], ids=str)
def test_what_does_not_fit_is_refused(shape: GangShape) -> None:
    with pytest.raises(CapacityError, match="do not fit on this machine"):
        Gang.start(shape)


def test_a_killed_driver_leaves_no_process(forked: bool) -> None:
    script = """
import os, signal, sys
from shoal.training import cluster
from shoal.training.gang.placement import GangShape
from shoal.training.gang.gang import Gang
from shoal.training.gang import child_processes
from shoal.training.gang.fork_template import fork_template
cluster.use_this_machine({"name": "here", "cpus": 2, "gpus": 0})
shape = GangShape(2, 1.0)
if sys.argv[1] == "True":
    child_processes.use_template(fork_template())
    child_processes.import_ahead(shape, [])
gang = Gang.start(shape)
import psutil
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script, str(forked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == (3 if forked else 2)
    assert_ended(pids)
