"""Two hundred jobs asked for at once on a pool of two one-CPU nodes, on SQLite and on PostgreSQL: is one lost?

Two further jobs occupy the nodes at first, so that all jobs wait. Each job has a waiting process of its own, as tasks
of an engine have: a fork of one that has imported shoal. Most jobs are cancelled once all of them wait, and a few wait
for longer than their timeout. Then the nodes become free, and the others train a small model. A job counts as lost
unless its one row and the process that waited for it have the same end, and it is the planned one.

The rows of running jobs name the drivers. Their memory and that of the waiting processes is PSS, which counts a page
that n processes share a n-th in each.

Run it with ``python -m tests.benchmarks.job_queue``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import select

from tests.benchmarks.process_tree import tree_bytes
from tests.benchmarks.report import table
from tests.benchmarks.store_load import postgresql
from tests.support.waiting import wait_until

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

_LOOK_S = 1.0
_LOOK_AT_WAITERS_EVERY = 15
"""Memory of 200 processes is read in one of so many looks, because it takes about a second of a core."""
_ROOM = 2
_WAIT_S = 240.0
"""Time limit of the jobs that exceed it while they wait; all jobs are in the queue before."""

RUN, CANCEL, TIME_OUT = "succeeded", "cancelled", "timed out"
"""The ends that jobs have to have."""


@dataclass(frozen=True)
class _Plan:
    """How many jobs have which end."""

    jobs: int
    running: int

    def end_of(self, number: int) -> str:
        if number < self.running:
            return RUN
        return TIME_OUT if number % 10 == 0 else CANCEL

    def ids(self, end: str) -> list[str]:
        return [f"job-{number}" for number in range(self.jobs) if self.end_of(number) == end]


def _drivers() -> list[psutil.Process]:
    """The drivers of the running jobs."""
    from shoal.os_processes import ProcessId
    from shoal.state import Store
    from shoal.state.schema import Job, JobState

    with Store().reading(snapshot=False) as session:
        rows = session.scalars(select(Job.driver).where(Job.state == JobState.RUNNING)).all()
    found = []
    for driver in filter(None, rows):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(ProcessId.from_json(driver).pid))
    return found


def _occupy(number: int) -> Any:
    """Submit a job that occupies a node until it is cancelled, and return its handle."""
    from shoal import RunConfig
    from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig

    # It uses no CPU: only its reservation counts.
    asleep = PyTorchDistributor(
        lambda: threading.Event().wait(),
        scaling_config=PyTorchScalingConfig(num_nodes=1, num_workers_per_node=1),
        run_config=RunConfig(pool_name="bench", job_id=f"occupying-{number}", orphan_after=None),
    )
    return asleep.submit()


def _ask(number: int, plan: _Plan, data: str, told: Any) -> None:
    """Ask for a job, wait for it, and tell how it ended as its waiter sees it."""
    from shoal import RunConfig, jobs
    from shoal.data import DataConnector
    from shoal.errors import JobCancelledError, JobFailedError
    from shoal.training.demand import XGBScalingConfig

    spec = jobs.JobSpec(
        dataset=DataConnector.from_parquet(data),
        input_cols=("a", "b"),
        label_col="y",
        n_estimators=10,
        params={"objective": "reg:squarederror"},
        scaling_config=XGBScalingConfig(num_workers=1, num_cpu_per_worker=1),
        run_config=RunConfig(
            pool_name="bench",
            job_id=f"job-{number}",
            timeout=_WAIT_S if plan.end_of(number) == TIME_OUT else None,
        ),
        tracking=None,
    )
    try:
        jobs.submit(spec, holder=f"airflow:bench/{number % 2}").wait(on_log=None)
        seen = RUN
    except JobCancelledError:
        seen = CANCEL
    except JobFailedError as error:
        seen = TIME_OUT if "for longer than its run_config.timeout" in str(error) else repr(error)
    except BaseException as error:
        seen = repr(error)
    told.put((f"job-{number}", seen))


def _lost(plan: _Plan, told: dict[str, str], rows: Sequence[Any]) -> list[str]:
    """The lost jobs, with what their waiter and their rows say."""
    from shoal.state.schema import JobState

    state = {RUN: JobState.SUCCEEDED, CANCEL: JobState.CANCELLED, TIME_OUT: JobState.FAILED}
    lost = []
    for planned in state:
        for name in plan.ids(planned):
            found = [row for row in rows if row.id == name]
            end = told.get(name, "")
            if end != planned or [row.state for row in found] != [state[planned]]:
                lost.append(f"{name}: {told.get(name)}, {[(row.state.value, row.error) for row in found]}")
    return lost


def measure(plan: _Plan, data: str) -> list[str]:
    """Run the jobs and return a row of figures."""
    from shoal import jobs
    from shoal.jobs.journal import job_queue
    from shoal.state import Store
    from shoal.state.schema import JOB_ENDED, Job, JobState

    context = multiprocessing.get_context("fork")
    told = context.Queue()
    waiters = [
        context.Process(target=_ask, args=(number, plan, data, told), daemon=True) for number in range(plan.jobs)
    ]
    occupying = [_occupy(number) for number in range(_ROOM)]
    wait_until(lambda: len(_drivers()) >= _ROOM, "the jobs that occupy the nodes", 120, every=_LOOK_S)
    began = time.perf_counter()
    for waiter in waiters:
        waiter.start()
    seen: dict[str, str] = {}
    to_cancel = plan.ids(CANCEL)
    most, driver_bytes, waiter_bytes, waiting, looks = 0, 0, 0, 0, 0
    all_asked = cancelled = 0.0
    while any(waiter.is_alive() for waiter in waiters):
        running = _drivers()
        sizes = [tree_bytes(driver.pid) for driver in running]
        most, driver_bytes = max(most, len(running)), max(driver_bytes, sum(sizes))
        if to_cancel:
            waiting = max(waiting, len(job_queue.places(Store())))
            with Store().reading(snapshot=False) as session:
                there = Job.queued_at.is_not(None) | Job.state.in_(JOB_ENDED)
                asked = len(session.execute(select(Job.id).where(Job.id.startswith("job-"), there)).all())
            if asked == plan.jobs:
                waiter_bytes = sum(tree_bytes(waiter.pid or 0) for waiter in waiters if waiter.is_alive())
                all_asked = time.perf_counter() - began
                for name in to_cancel:
                    jobs.attach(name).cancel()
                cancelled = time.perf_counter() - began - all_asked
                to_cancel = []
        elif occupying:
            with Store().reading(snapshot=False) as session:
                late = select(Job.id).where(Job.id.in_(plan.ids(TIME_OUT)), Job.state.not_in(JOB_ENDED))
                if session.scalars(late).first() is None:
                    for handle in occupying:
                        handle.cancel()
                    occupying = []
        if looks % _LOOK_AT_WAITERS_EVERY == 0:
            waiter_bytes = max(waiter_bytes, sum(tree_bytes(each.pid or 0) for each in waiters if each.is_alive()))
        while not told.empty():
            name, end = told.get()
            seen[name] = end
        looks += 1
        time.sleep(_LOOK_S)
    seconds = time.perf_counter() - began
    while not told.empty():
        name, end = told.get()
        seen[name] = end
    with Store().reading() as session:
        every = list(session.scalars(select(Job).where(Job.id.startswith("job-"))))
    lost = _lost(plan, seen, every)
    print(*lost, sep="\n", flush=True)
    print(f"all waited after {all_asked:.0f} s; {len(plan.ids(CANCEL))} cancelled in {cancelled:.0f} s", flush=True)
    rows = [row for row in every if row.state is JobState.SUCCEEDED]
    took = statistics.median(row.ended_at - row.started_at for row in rows)
    starts = statistics.median(row.started_at - row.admitted_at for row in rows)
    # The first jobs find room at once; each later one gets the room of the one that ended as many places before it.
    admitted, ended = sorted(row.admitted_at for row in rows)[_ROOM:], sorted(row.ended_at for row in rows)
    handover = statistics.median(then - before for then, before in zip(admitted, ended, strict=False))
    mb = 2**20
    return [
        f"{waiting}", *(f"{sum(end == each for end in seen.values())}" for each in (RUN, CANCEL, TIME_OUT)),
        f"{len(lost)}", f"{waiter_bytes / mb:.0f}", f"{most}", f"{driver_bytes / mb:.0f}", f"{seconds:.0f}",
        f"{handover:.1f}", f"{starts:.1f}", f"{took:.1f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure many jobs that are asked for at once.")
    parser.add_argument("--jobs", type=int, default=200, help="jobs (default 200)")
    parser.add_argument("--running", type=int, default=12, help="so many of them train (default 12)")
    parser.add_argument("--stores", nargs="+", default=["SQLite", "PostgreSQL"], help="which (default both)")
    args = parser.parse_args(argv)
    import numpy as np
    import pandas as pd

    from shoal import ComputePool

    logging.disable(logging.INFO)
    plan, rows = _Plan(args.jobs, args.running), []
    for store in args.stores:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qb-"))
            os.environ["SHOAL_HOME"] = f"{folder}/home"
            os.environ.pop("SHOAL_STATE_URL", None)
            if store == "PostgreSQL":
                os.environ["SHOAL_STATE_URL"] = stack.enter_context(postgresql(args.jobs))
            random = np.random.default_rng(0)
            frame = pd.DataFrame({"a": random.random(5_000), "b": random.random(5_000)})
            data = str(Path(folder) / "train.parquet")
            frame.assign(y=frame["a"] + frame["b"]).to_parquet(data)
            pool = ComputePool("local://bench?max_nodes=2&min_nodes=2&cpus_per_node=1").up()
            stack.callback(pool.down)
            rows.append([store, *measure(plan, data)])
    head = [f"{args.jobs} jobs, two nodes of one CPU", "waiting at once", RUN, CANCEL, TIME_OUT, "lost",
            "waiters' MB", "drivers at once", "their MB", "seconds", "ended until next admitted, median s",
            "sent until begun", "begun until ended"]  # fmt: skip
    print(table(head, rows), flush=True)


if __name__ == "__main__":
    main()
