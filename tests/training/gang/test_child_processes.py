"""A gang whose workers are processes of this machine, without Ray: the same gang in every other respect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import CapacityError, DataError, TrainingError, WorkerLostError
from shoal.training import cluster
from shoal.training.capacity import Node
from shoal.training.context import gang_context
from shoal.training.gang.gang import Gang
from shoal.training.gang.placement import GangShape
from shoal.training.gang.shared import end_gangs, shared_gang
from tests.support.two_node_cluster import assert_ended
from tests.support.waiting import wait_until

TWO = GangShape(2, 1.0)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    end_gangs()
    monkeypatch.setattr(cluster, "_this_machine", Node(name="here", cpus=2, gpus=0))
    yield
    end_gangs()


def where_am_i(*args: Any) -> tuple[Any, ...]:
    context = gang_context()
    print("printed by", context.rank)
    return context.rank, context.world_size, context.local_world_size, os.getcwd(), os.environ.get("SECRET"), args


def fail_in_rank_1() -> None:
    if gang_context().rank == 1:
        raise DataError("null label")
    threading.Event().wait()


def test_workers_have_ranks_folder_and_environment_and_what_they_print_is_printed_here(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with shared_gang(TWO, env={"PWD": str(tmp_path), "SECRET": "s3cret"}) as gang:
        results = gang.run(where_am_i, [("x",), ("y",)])
        pids = [worker.pid for worker in gang.workers]
        assert gang.run(os.getpid, [(), ()]) == pids
    here = str(tmp_path)
    assert results == [(0, 2, 2, here, "s3cret", ("x",)), (1, 2, 2, here, "s3cret", ("y",))]
    assert "SECRET" not in os.environ
    end_gangs()
    assert_ended(pids)
    said = ""

    def printed() -> bool:
        nonlocal said
        said += capfd.readouterr().out
        return all(f"(worker pid={pid}) printed by {rank}" in said for rank, pid in enumerate(pids))

    wait_until(printed, "the lines of both workers")


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


def test_a_killed_driver_leaves_no_process() -> None:
    script = """
import os, signal
from shoal.training import cluster
from shoal.training.gang.placement import GangShape
from shoal.training.gang.gang import Gang
cluster.use_this_machine({"name": "here", "cpus": 2, "gpus": 0})
gang = Gang.start(GangShape(2, 1.0))
print(*(worker.pid for worker in gang.workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert_ended([int(pid) for pid in done.stdout.split()])
