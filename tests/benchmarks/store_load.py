"""The store under waiters and drivers: how much they write, and what they do to the others.

Many processes wait for one pool that does not come up, or for a job each that does not end, or write the heartbeats of
a driver, without and with metrics. Each is a fork of one that has imported shoal, so that 200 of them fit into memory;
each has its own connection to the store, as tasks of an engine have. Counted are the write transactions that they begin
(from when they all run) and the time for which these hold the store's lock, and timed is what `shoal jobs list` does of
the store, alone and beside them.

Run it with ``python -m tests.benchmarks.store_load``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks.report import table

_SETTLE_S = 15.0
"""From the last start until counting: by then every waiter has written what it writes once."""

_JOBS = 100
"""Attempts in the list, with specs as large as those of a training on many files."""

_ROUNDS_S = 1
"""Rounds that each driver reports in a second, with two metrics each."""

_ROUNDS_BEFORE = 128
"""Rounds that each driver has reported before: half of what the row has that heartbeats write again."""


class _Waiters:
    """Runs waiters, and measures their write transactions."""

    def __init__(self, wait: Callable[[int], object], count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._writes = context.Value("q", 0)
        self._locked = context.Value("d", 0.0)
        self._started = context.Value("q", 0)
        self._wait = wait
        self._processes = [context.Process(target=self._run, args=(number,)) for number in range(count)]

    def __enter__(self) -> _Waiters:
        for process in self._processes:
            process.start()
        while self._started.value < len(self._processes):
            time.sleep(0.1)
        time.sleep(_SETTLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        ended = sum(not process.is_alive() for process in self._processes)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if ended:
            raise RuntimeError(f"{ended} of {len(self._processes)} waiters ended before they were told to")

    @property
    def writes(self) -> int:
        """Write transactions of all waiters so far."""
        return int(self._writes.value)

    @property
    def locked(self) -> float:
        """Seconds for which all waiters have held the store's lock so far."""
        return float(self._locked.value)

    def _run(self, number: int) -> None:
        from shoal.state import Store

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logging.disable(logging.CRITICAL)
        transaction = Store.transaction

        @contextlib.contextmanager
        def counted(store: Store) -> Iterator[object]:
            with self._writes.get_lock():
                self._writes.value += 1
            began = time.perf_counter()
            try:
                with transaction(store) as session:
                    session.connection()  # waits for the lock
                    began = time.perf_counter()
                    yield session
            finally:
                held = time.perf_counter() - began
                with self._locked.get_lock():
                    self._locked.value += held

        Store.transaction = counted  # type: ignore[method-assign, assignment]
        with self._started.get_lock():
            self._started.value += 1
        self._wait(number)


def _percentile(seconds: int) -> float:
    """Milliseconds that 99 of 100 listings stay below."""
    from shoal.jobs import list_jobs

    taken = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        list_jobs()
        taken.append(time.perf_counter() - began)
        time.sleep(0.02)
    return statistics.quantiles(taken, n=100)[98] * 1000 if len(taken) > 1 else taken[0] * 1000


def _wait_for_pool(_: int) -> None:
    from shoal.pool.waiting import Waiting
    from shoal.state import Store

    Waiting(Store(), "bench", time.time).for_operation("waited-for", math.inf, on_progress=None)


def _wait_for_job(number: int) -> None:
    from shoal.jobs.submission import attach

    attach(f"job-{number}", 1).wait(on_log=lambda line: None)


def _drive(number: int, *, metrics: bool) -> None:
    from shoal.jobs.driver.attempt_metrics import MetricSeries
    from shoal.jobs.driver.heartbeats import HeartbeatThread
    from shoal.jobs.journal.attempts import Key
    from shoal.jobs.timeouts import HEARTBEAT_S, ROW_CHECK_S
    from shoal.state import Store
    from shoal.training.run_config import RunConfig

    series = MetricSeries(Key(f"job-{number}", 1))
    heartbeats = HeartbeatThread(Store(), Key(f"job-{number}", 1), series, RunConfig())
    time.sleep(number % 100 * HEARTBEAT_S / 100)  # real drivers do not start at one instant
    for step in itertools.count(_ROUNDS_BEFORE, round(_ROUNDS_S * ROW_CHECK_S)):
        for each in range(0 if step == _ROUNDS_BEFORE else step - round(_ROUNDS_S * ROW_CHECK_S), step):
            if metrics:
                series.log(0, {"train-rmse": 1 / (each + 1), "validation-rmse": 2 / (each + 1)}, each)
        heartbeats.look()
        time.sleep(ROW_CHECK_S)


def _fill(waiters: int) -> None:
    """A pool whose one node is being started, an operation that waits for it, and running jobs."""
    from shoal.jobs.files.logs import log_path
    from shoal.jobs.journal import attempts
    from shoal.jobs.journal.attempts import Key, Order
    from shoal.os_processes import ProcessId, host_id, hostname
    from shoal.pool.spec import PoolSpec
    from shoal.state import Store
    from shoal.state.schema import (
        Demand,
        Node,
        NodeState,
        Operation,
        OperationKind,
        OperationState,
        Pool,
        PoolState,
    )

    store, now, me = Store(), time.time(), ProcessId.mine().to_json()
    with store.transaction() as session:
        session.add(
            Pool(
                name="bench", spec=PoolSpec(name="bench").model_dump(), state=PoolState.UP, host=hostname(),
                host_id=host_id(), min_nodes=1, max_nodes=4, epoch=1, next_node=1, created_at=now, touched_at=now,
            )
        )  # fmt: skip
        session.flush()
        session.add(Demand(pool="bench", size=1, operation_id="waited-for", set_at=now))
        session.add(
            Operation(
                id="waited-for", pool="bench", kind=OperationKind.UP, state=OperationState.OPEN, holder="bench", size=1,
                deadline=now + 36000, failures=0, node_errors={}, created_at=now,
            )
        )  # fmt: skip
        session.add(
            Node(
                id="0123456789", pool="bench", name="bench-0", is_head=True, state=NodeState.STARTING, epoch=1, cpus=1,
                gpus=0, busy=False, supervisor=me, spawned_at=now, start_deadline=now + 36000, created_at=now,
            )
        )  # fmt: skip
    spec = {"fingerprint": "q", "dataset": {"paths": [f"/data/part-{number}.parquet" for number in range(50)]}}
    for number in range(max(waiters, _JOBS)):
        order = Order(f"job-{number}", "bench", "airflow:dag/run", spec, {"api": "a", "gcs": "g"}, 900.0)
        attempts.ask(store, order, now)
        attempts.start(store, Key(f"job-{number}", 1), me, now)
        log_path(Key(f"job-{number}", 1)).parent.mkdir(parents=True)
        log_path(Key(f"job-{number}", 1)).write_text("round 1\n")


def measure(waiters: int, seconds: int) -> list[list[str]]:
    """Figures of one store, a row for each thing that is waited for."""
    _fill(waiters)
    idle = _percentile(seconds)
    rows = []
    each: dict[str, Callable[[int], object]] = {
        "wait for the pool": _wait_for_pool,
        "wait for a job each": _wait_for_job,
        "drive a job each": partial(_drive, metrics=False),
        "drive a job each, with metrics": partial(_drive, metrics=True),
    }
    for name, run in each.items():
        with _Waiters(run, waiters) as running:
            before, locked, began = running.writes, running.locked, time.perf_counter()
            busy = _percentile(seconds)
            took = time.perf_counter() - began
            writes, locked = running.writes - before, running.locked - locked
        figures = [writes / took, locked / took * 1000, locked / max(writes, 1) * 1000, idle, busy, busy / idle]
        rows.append([name, *(f"{figure:.2f}" for figure in figures)])
    return rows


@contextlib.contextmanager
def postgresql(waiters: int) -> Iterator[str]:
    from tests.support.postgres import Postgres

    server = Postgres(max_connections=waiters + 50)
    try:
        name = f"shoal_{uuid.uuid4().hex[:8]}"
        server.run(f"CREATE DATABASE {name}")
        yield server.url(name)
    finally:
        server.remove()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the store under many that wait.")
    parser.add_argument("--waiters", type=int, default=200, help="processes that wait (default 200)")
    parser.add_argument("--seconds", type=int, default=30, help="how long each is measured (default 30)")
    parser.add_argument("--stores", nargs="+", default=["SQLite", "PostgreSQL"], help="which (default both)")
    args = parser.parse_args(argv)
    logging.disable(logging.INFO)
    head = ["writes/s", "locked, ms/s", "ms a write", "list alone, p99 ms", "beside them", "x alone"]
    for store in args.stores:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sb-")))
            os.environ["SHOAL_HOME"] = str(folder)
            os.environ.pop("SHOAL_STATE_URL", None)
            if store == "PostgreSQL":
                os.environ["SHOAL_STATE_URL"] = stack.enter_context(postgresql(args.waiters))
            rows = measure(args.waiters, args.seconds)
        print(table([f"{store}: {args.waiters} processes", *head], rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
