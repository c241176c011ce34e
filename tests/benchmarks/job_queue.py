"""Forty small jobs asked for at once on a pool of two one-CPU nodes: seconds, drivers at once, memory.

Each job has a waiting process of its own, as tasks of an engine have: a fork of one that has imported shoal. Drivers
are counted in the list of processes, their memory and that of the waiting processes is PSS, which counts a page that n
processes share a n-th in each.

Run it with ``python -m tests.benchmarks.job_queue``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from sqlalchemy import select

from tests.benchmarks.process_tree import tree_bytes
from tests.benchmarks.report import table

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

_LOOK_S = 1.0
_ROOM = 2


def _drivers(home: str) -> list[psutil.Process]:
    """The drivers of this home that run."""
    found = []
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
            if "shoal.jobs.driver" in arguments and "sh" not in arguments[0].rpartition("/")[2]:
                found += [process] if process.environ().get("SHOAL_HOME") == home else []
        except psutil.Error:
            continue
    return found


def _train(number: int, data: str) -> None:
    """Ask for a job and wait for its result."""
    from shoal import RunConfig, jobs
    from shoal.data import DataConnector
    from shoal.training.scaling import XGBScalingConfig

    spec = jobs.JobSpec(
        dataset=DataConnector.from_parquet(data),
        input_cols=("a", "b"),
        label_col="y",
        n_estimators=10,
        params={"objective": "reg:squarederror"},
        scaling_config=XGBScalingConfig(num_workers=1, num_cpu_per_worker=1),
        run_config=RunConfig(pool_name="bench", job_id=f"job-{number}"),
        tracking=None,
    )
    jobs.submit(spec, holder=f"airflow:bench/{number % 2}").wait(on_log=None)


def measure(count: int, data: str, home: str) -> list[str]:
    """Run the jobs and return a row of figures."""
    from shoal.state import Store
    from shoal.state.schema import Job, JobState

    context = multiprocessing.get_context("fork")
    waiters = [context.Process(target=_train, args=(number, data)) for number in range(count)]
    began = time.perf_counter()
    for waiter in waiters:
        waiter.start()
    most, driver_bytes, waiter_bytes, one_driver = 0, 0, 0, 0
    while any(waiter.is_alive() for waiter in waiters):
        running = _drivers(home)
        sizes = [tree_bytes(driver.pid) for driver in running]
        most, driver_bytes = max(most, len(running)), max(driver_bytes, sum(sizes))
        one_driver = max([one_driver, *sizes])
        waiter_bytes = max(waiter_bytes, sum(tree_bytes(waiter.pid or 0) for waiter in waiters if waiter.is_alive()))
        time.sleep(_LOOK_S)
    seconds = time.perf_counter() - began
    with Store().reading() as session:
        rows = list(session.scalars(select(Job).where(Job.state == JobState.SUCCEEDED)))
    took = statistics.median(row.ended_at - row.started_at for row in rows)
    starts = statistics.median(row.started_at - row.admitted_at for row in rows)
    # The first jobs find room at once; each later one gets the room of the one that ended as many places before it.
    admitted, ended = sorted(row.admitted_at for row in rows)[_ROOM:], sorted(row.ended_at for row in rows)
    handover = statistics.median(then - before for then, before in zip(admitted, ended, strict=False))
    mb = 2**20
    return [
        f"{count} jobs", f"{len(rows)}", f"{seconds:.0f}", f"{handover:.1f}", f"{starts:.1f}", f"{took:.1f}",
        f"{most}", f"{driver_bytes / mb:.0f}", f"{one_driver / mb:.0f}", f"{waiter_bytes / mb:.0f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure many jobs that are asked for at once.")
    parser.add_argument("--jobs", type=int, default=40, help="jobs (default 40)")
    args = parser.parse_args(argv)
    import numpy as np
    import pandas as pd

    from shoal import ComputePool

    with tempfile.TemporaryDirectory(prefix="qb-") as folder:
        os.environ["SHOAL_HOME"] = f"{folder}/home"
        os.environ.pop("SHOAL_STATE_URL", None)
        random = np.random.default_rng(0)
        frame = pd.DataFrame({"a": random.random(5_000), "b": random.random(5_000)})
        data = str(Path(folder) / "train.parquet")
        frame.assign(y=frame["a"] + frame["b"]).to_parquet(data)
        pool = ComputePool("local://bench?max_nodes=2&min_nodes=2&cpus_per_node=1").up()
        try:
            row = measure(args.jobs, data, os.environ["SHOAL_HOME"])
        finally:
            pool.down()
    head = ["two nodes of one CPU", "succeeded", "seconds", "room until next, median s", "sent until begun",
            "begun until ended", "drivers at once", "their MB", "largest MB", "waiters' MB"]  # fmt: skip
    print(table(head, [row]), flush=True)


if __name__ == "__main__":
    main()
