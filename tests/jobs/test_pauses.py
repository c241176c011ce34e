"""Jobs of every kind go on after any of their processes, or all of them, were stopped (SIGSTOP) and continued.

``SHOAL_PAUSE_S`` is the length of each pause; ``SHOAL_PAUSED`` names the only victim, such as "all".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pandas as pd
import psutil
import pytest

from shoal import ComputePool, RunConfig, jobs, many
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig
from shoal.errors import JobCancelledError
from shoal.jobs.handle import JobHandle
from shoal.os_processes import ProcessId
from shoal.training.host.own_process import WORKER
from tests.jobs.test_forked_workers import driver_of, forever, rows
from tests.pool.backends.foreign import ForeignCluster
from tests.support.pool_processes import living, node_rows, nothing_left
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long]

__all__ = ["rows"]

PAUSE_S = float(os.environ.get("SHOAL_PAUSE_S", "130"))
PAUSED = os.environ.get("SHOAL_PAUSED")


def running(*words: str) -> list[int]:
    """The processes of this home with one of these words in their command lines."""
    return [each.pid for each in living() if each.is_of_home() and any(word.encode() in each.command for word in words)]


def below(pids: Iterable[int]) -> list[int]:
    """The descendants of these processes; the environment of an actor of Ray, which has a title, cannot be read."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found += [each.pid for each in psutil.Process(pid).children(recursive=True)]
    return found


def everything() -> set[int]:
    """All processes of this home, and those in pods, which have its store."""
    store = f"SHOAL_STATE_URL={os.environ.get('SHOAL_STATE_URL')}".encode()
    of_home = [each.pid for each in living() if each.is_of_home() or store in each.environment]
    return {*of_home, *below(of_home)}


def workers() -> list[int]:
    """The workers, without the processes in which those of partitions call the function: forks with the same title."""
    own, titles = everything(), (WORKER.encode(), b"ray::Worker")
    found = {each.pid for each in living() if each.pid in own and each.command.startswith(titles)}
    return sorted(found - set(below(found)))


def driver_here(handle: JobHandle) -> int:
    """The driver's process id on this machine: in a pod it has another one."""
    its_own = driver_of(handle).pid
    commands = {each.pid: each.command for each in living()}
    [pid] = [
        pid for pid in everything()
        if b"shoal.jobs.driver" in commands.get(pid, b"")
        and int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()[-1]) == its_own
    ]  # fmt: skip
    return pid


Victims = Mapping[str, Callable[[JobHandle], Iterable[int]]]

VICTIMS: Victims = {
    "all": lambda _: everything(),
    "a worker": lambda _: workers()[:1],
    "the children of a worker": lambda _: below(workers()[:1]),
    "the driver": lambda handle: [driver_here(handle)],
    "the driver and its workers": lambda handle: [driver_here(handle), *workers(), *below(workers())],
    "the caller": lambda _: running("embedded-fit"),
    "the supervisors": lambda _: [ProcessId.from_json(node.supervisor).pid for node in node_rows() if node.supervisor],
    "the reconciler": lambda _: running("shoal.reconciler"),
    "the raylets": lambda _: [each.pid for each in psutil.process_iter() if each.name() == "raylet"
                              and each.pid in running("raylet")],
    "the GCS": lambda _: running("gcs_server"),
}  # fmt: skip


@contextmanager
def on_a_local_pool(submit: Callable[[ComputePool, Path], JobHandle], ray: str, rows: Path) -> Iterator[JobHandle]:
    pool = ComputePool(f"local://paused?max_nodes=2&min_nodes=2&ray={ray}").up()
    try:
        yield submit(pool, rows)
    finally:
        pool.down()


@contextmanager
def on_a_ray_cluster(rows: Path) -> Iterator[JobHandle]:
    home = {"SHOAL_HOME": os.environ["SHOAL_HOME"], "SHOAL_PYTHON": sys.executable}
    usual = {"RAY_health_check_period_ms": "3000", "RAY_health_check_failure_threshold": "5"}
    with ForeignCluster("static", workers=1, environment={**home, **usual}) as cluster:
        pool = ComputePool(cluster.uri(min_nodes=2, shared_folders=f"{rows.parent},{home['SHOAL_HOME']}")).up()
        try:
            yield waited_for(forever(pool, rows, "xgboost", 2))
        finally:
            pool.down()


def waited_for(handle: JobHandle) -> JobHandle:
    """Wait for the end of the job in a thread: the waiting process gives the driver the job's credentials."""

    def wait_for_end() -> None:
        with suppress(JobCancelledError):
            handle.wait(on_log=None)

    threading.Thread(target=wait_for_end, daemon=True).start()
    return handle


EMBEDDED_FIT = """
import sys
from shoal import RunConfig
from shoal.data import DataConnector
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
scaling, config = XGBScalingConfig(num_workers=2, num_cpu_per_worker=1), RunConfig(job_id=sys.argv[1], tracking=None)
data = DataConnector.from_parquet(sys.argv[2])
XGBEstimator(10_000_000, scaling_config=scaling, run_config=config).fit(data, ["a", "b"], "y", {"eval": data}, 100)
"""


@contextmanager
def in_a_program(rows: Path) -> Iterator[JobHandle]:
    """A `fit` without a pool, which starts an embedded one."""
    program = subprocess.Popen([sys.executable, "-c", EMBEDDED_FIT, "embedded-fit", str(rows)])
    try:
        yield wait_until(lambda: attached("embedded-fit"), "the job", 120)
        program.wait(timeout=60)
    finally:
        program.kill()
        program.wait()


def attached(job_id: str) -> JobHandle | None:
    with suppress(LookupError):
        return jobs.attach(job_id)
    return None


def boosting(framework: str, pool: ComputePool, rows: Path) -> JobHandle:
    return forever(pool, rows, framework, 2)


def reduce_for_ever() -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    for step in range(10**9):
        torch.distributed.all_reduce(torch.ones(1))
        time.sleep(0.1)
        print(f"step {step}", flush=True)


def ranks(pool: ComputePool, _: Path) -> JobHandle:
    config = RunConfig(pool_name=pool.name, tracking=None)
    return PyTorchDistributor(reduce_for_ever, PyTorchScalingConfig(num_nodes=2), config).submit().job


def partition(frame: pd.DataFrame, key: int) -> float:
    time.sleep(0.3)
    print(f"key {key}", flush=True)
    return float(frame.x.sum())


def partitions(pool: ComputePool, _: Path) -> JobHandle:
    frame = pd.DataFrame({"k": range(30_000), "x": 1.0})
    return many.submit_run(
        fn=partition, data=frame, by="k", run_config=RunConfig(pool_name=pool.name, tracking=None)
    ).job


KINDS: dict[str, Callable[[Path], AbstractContextManager[JobHandle]]] = {
    **{f"{name} ray={ray}": partial(on_a_local_pool, submit, ray)
       for name, submit in {"xgboost": partial(boosting, "xgboost"), "lightgbm": partial(boosting, "lightgbm"),
                            "torch": ranks, "partitions": partitions}.items()
       for ray in ("true", "false")},
    "xgboost embedded": in_a_program,
    "xgboost ray://": on_a_ray_cluster,
}  # fmt: skip
THEIRS = {"xgboost ray://": {"the raylets", "the GCS"}}
"""Victims whose pauses end nodes without any judge of ours: the cluster of another decides on its own nodes."""


def has_more_lines(handle: JobHandle, seen: int) -> bool:
    return len(list(handle.logs())) > seen + 3


def goes_on(handle: JobHandle, seconds: float) -> None:
    wait_until(partial(has_more_lines, handle, len(list(handle.logs()))), "further rounds", seconds, every=0.5)


def pause(pids: Iterable[int]) -> None:
    stopped = []
    try:
        for pid in pids:
            with suppress(ProcessLookupError):  # a short one has ended meanwhile
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        threading.Event().wait(PAUSE_S)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):  # one that was wrongly taken for lost
                os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_goes_on_after_every_pause(fresh_home: Path, rows: Path, kind: str) -> None:
    with KINDS[kind](rows) as handle:
        failures = pauses_that_end(handle, kind)
    wait_until(lambda: not node_rows(), "the end of the embedded pool")
    nothing_left()
    assert not failures


def pauses_that_end(handle: JobHandle, kind: str, victims: Victims = VICTIMS) -> list[str]:
    """Pause each of the victims in turn, return those whose pause the job has not survived, and cancel the job."""
    try:
        try:
            goes_on(handle, 120)
        except AssertionError as error:
            error.add_note(f"{handle.status()} {[(node.name, node.state, node.error) for node in node_rows()]}")
            raise
        return _pauses_that_end(handle, kind, victims)
    finally:
        handle.cancel()


def _pauses_that_end(handle: JobHandle, kind: str, victims: Victims) -> list[str]:
    before, nodes = set(workers()), {node.id for node in node_rows()}
    assert len(before) == 2
    failures = []
    for name, find in victims.items():
        if PAUSED not in (None, name) or name in THEIRS.get(kind, ()) or not (pids := set(find(handle))):
            continue  # a pool without Ray has no such process
        pause(pids)
        problem = ""
        try:
            goes_on(handle, 60)
            # The kernel breaks LightGBM's connections, so its trainings go on from a checkpoint, in new workers.
            assert set(workers()) == before or "lightgbm" in kind, "other workers"
            assert {node.id for node in node_rows()} == nodes, "other nodes"
        except AssertionError as error:
            problem = str(error).splitlines()[0] or "failed"
            now = [(node.name, node.state, node.error) for node in node_rows()]
            failures.append(f"{name}: {problem}: {handle.status().error} {list(handle.logs())[-3:]} {now}")
        before, nodes = set(workers()), {node.id for node in node_rows()}
        print(f"{kind}, {PAUSE_S:.0f} s: {name} ({len(pids)}): {problem or 'goes on'}", flush=True)
        if handle.has_ended:
            break
    return failures
