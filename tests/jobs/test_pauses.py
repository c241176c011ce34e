"""Trainings go on after any of their processes, or all of them, were stopped (SIGSTOP) and continued.

``SHOAL_PAUSE_S`` is the length of each pause.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from shoal import ComputePool
from shoal.jobs.handle import JobHandle
from shoal.os_processes import ProcessId
from tests.jobs.test_forked_workers import driver_of, forever, pids_of, row_of, rows, training
from tests.support.pool_processes import living, node_rows, nothing_left
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long]

__all__ = ["rows"]

PAUSE_S = float(os.environ.get("SHOAL_PAUSE_S", "130"))


def running(*words: str) -> list[int]:
    """The processes of this home with one of these words in their command lines."""
    return [each.pid for each in living() if each.is_of_home() and any(word.encode() in each.command for word in words)]


def supervisors() -> list[int]:
    return [ProcessId.from_json(node.supervisor).pid for node in node_rows()]


VICTIMS: dict[str, Callable[[JobHandle, list[int]], Iterable[int]]] = {
    "all": lambda _, workers: {each.pid for each in living() if each.is_of_home()},
    "a worker": lambda _, workers: workers[:1],
    "the driver": lambda handle, _: [driver_of(handle).pid],
    "the driver and its workers": lambda handle, workers: [driver_of(handle).pid, *workers],
    "the supervisors": lambda *_: supervisors(),
    "the reconciler": lambda *_: running("shoal.reconciler"),
    "the raylets": lambda *_: [each.pid for each in psutil.process_iter() if each.name() == "raylet"
                               and each.pid in running("raylet")],
    "the GCS": lambda *_: running("gcs_server"),
}  # fmt: skip


def has_more_lines(handle: JobHandle, seen: int) -> bool:
    return len(list(handle.logs())) > seen + 3


def pause(pids: Iterable[int]) -> None:
    stopped = list(pids)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        threading.Event().wait(PAUSE_S)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # one that was wrongly taken for lost
                os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("framework", ["xgboost", "lightgbm"])
@pytest.mark.parametrize("ray", ["true", "false"])
def test_a_training_goes_on_after_every_pause(fresh_home: Path, rows: Path, ray: str, framework: str) -> None:
    pool = ComputePool(f"local://paused?max_nodes=2&min_nodes=2&ray={ray}").up()
    try:
        handle = forever(pool, rows, framework, 2)
        failures = pauses_that_end(handle, f"ray={ray} {framework}, {PAUSE_S:.0f} s")
        assert row_of("paused-0").is_head
        handle.cancel()
    finally:
        pool.down()
    nothing_left()
    assert not failures


def pauses_that_end(handle: JobHandle, what: str) -> list[str]:
    """Pause each of the victims in turn, and return those whose pause the training has not survived."""
    workers = pids_of(training(handle))
    nodes = {node.id for node in node_rows()}
    failures = []
    for name, find in VICTIMS.items():
        if not (pids := list(find(handle, workers))):
            continue  # a pool without Ray has no such process
        pause(pids)
        seen = len(list(handle.logs()))
        try:
            wait_until(partial(has_more_lines, handle, seen), "further rounds", 60)
            found = pids_of(training(handle))
            # The kernel breaks LightGBM's connections, so its trainings go on from a checkpoint, in new workers.
            assert set(found) == set(workers) or "lightgbm" in what, "other workers"
            assert {node.id for node in node_rows()} == nodes, "other nodes"
            workers, problem = found, ""
        except AssertionError as error:
            problem = str(error).splitlines()[0] or "failed"
            failures.append(f"{name}: {problem}: {handle.status().error} {list(handle.logs())[-3:]}")
            workers, nodes = pids_of(training(handle)), {node.id for node in node_rows()}
        print(f"{what}: {name} ({len(pids)}): {problem or 'goes on'}", flush=True)
    return failures
