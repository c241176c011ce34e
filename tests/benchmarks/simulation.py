"""Many teams, pools, nodes, jobs and deferred tasks on one store: what grows faster than what it is for?

The store, the planner and the queue are the real ones. The nodes are not: each is ready at the first look after its
start, and no process is behind it. Hours pass by a clock that the simulation sets. One number grows at a time, in three
steps up to its largest, while the others stay small, and each operation is measured at each step: CPU of this process
and SQL statements. The growth is the exponent between the first and the last step: 0 if the number does not matter, 1
if the time is proportional to it. With 1, doing the operation once for each takes the square of the number.

Run it with ``python -m tests.benchmarks.simulation``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Update, func, insert, update

from shoal import describe_pool, jobs
from shoal.airflow.triggers import JobTrigger, JobWait, PoolTrigger, PoolWait
from shoal.jobs.files.retention import prune_jobs
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.journal.job_queue import Admission
from shoal.jobs.reconcile.look import Target
from shoal.jobs.reconcile.rounds import Waiter
from shoal.jobs.status import store_mark
from shoal.os_processes import ProcessId
from shoal.pool import reconciling
from shoal.pool.api import list_pools
from shoal.pool.backends.interface import Arrival, NodeRef, PoolRef, Seen
from shoal.pool.backends.local.backend import LocalBackend
from shoal.pool.journal.rows import retain
from shoal.pool.options.local import LocalOptions
from shoal.pool.reconciling import KeptReadings, reconcile
from shoal.pool.spec import PoolSpec
from shoal.reconciler import LostJobs
from shoal.state import Store, stamps
from shoal.state.schema import Demand, Job, JobState, NodeState, Pool
from shoal.training.demand import GangClaim
from shoal.ui.live import StoreReader
from tests.benchmarks.report import table
from tests.benchmarks.store_load import postgresql
from tests.support import clocks
from tests.support.job_store import add_pool, change_pool
from tests.support.statements import statements

_TEAMS, _NODES, _REPEATS, _DAY_S = 40, 25, 3, 86400.0


@dataclass(frozen=True)
class Load:
    """How many there are; the values are those of the numbers that do not grow. Only the first pool has jobs."""

    pools: int = 8
    waiting: int = 100
    ended: int = 100
    deferred: int = 100


MOST = Load(pools=200, waiting=20_000, ended=20_000, deferred=2_000)


class FakeBackend(LocalBackend):
    """Nodes without processes."""

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        planned = [node.id for node in nodes if node.state is NodeState.PLANNED]
        memory = {"memory_bytes": str(2**40)}
        return Seen(arrived={each: Arrival({"ray_node_id": each, **memory}, spec.cpus_per_node, 0) for each in planned})

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None: ...

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        return {node.id: None for node in nodes}

    def existing(self) -> list[str]:
        return []


class World:
    """A store with this load, and what is done on it."""

    def __init__(self, load: Load, clock: clocks.Clock) -> None:
        self.load, self.clock, self.store = load, clock, Store()
        self.names = [f"pool-{number:03}" for number in range(load.pools)]
        self.first, self.now = self.names[0], clock()
        for name in self.names:
            spec = PoolSpec(name=name, min_nodes=_NODES, max_nodes=_NODES + 5, cpus_per_node=1, idle_timeout=None)
            add_pool(self.store, name)
            change_pool(self.store, spec)
            with self.store.transaction() as session:
                row = session.get_one(Pool, name)
                row.min_nodes, row.max_nodes, row.seen_at = spec.min_nodes, spec.max_nodes, self.now
                session.add(Demand(pool=name, size=_NODES, set_at=self.now))
            for _ in range(4):
                reconcile(self.store, name, clock=clock)
        self._add_jobs(load.ended, "ended", state=JobState.SUCCEEDED, ended_at=self.now - 9 * _DAY_S)
        self._add_jobs(_NODES, "runs", queued_at=self.now - 1, queued_clock=stamps.stamp(self.now - 1))
        self.running = [Key(f"runs-{number}", 1) for number in range(_NODES)]
        for key in self.running:
            assert job_queue.admit(self.store, key, self.now, {}) is Admission.NOW
            attempts.start(self.store, key, ProcessId.mine().to_json(), self.now)
        self._add_jobs(load.waiting, "waits", queued_at=self.now, queued_clock=stamps.stamp(self.now))
        self._asked, self._left = 0, [Key(f"waits-{number}", 1) for number in range(load.waiting)]
        self._kept = KeptReadings(self.store)
        self._waits = asyncio.run(self._begin_waits())

    def _order(self, name: str, number: int) -> Order:
        paths = [f"/data/part-{part}.parquet" for part in range(50)]
        spec = {"dataset": {"paths": paths}, "input_cols": ["x"], "label_col": "y", "fingerprint": "1"}
        return Order(
            f"{name}-{number}", self.first, f"airflow:bench/{number}", spec, {}, None,
            gang=GangClaim(workers=1, cpus=1).to_json(), team=f"team-{number % _TEAMS}",
        )  # fmt: skip

    def _add_jobs(self, count: int, name: str, **values: Any) -> None:
        first = attempts.ask(self.store, self._order(name, 0), self.now - 10 * _DAY_S)
        columns = {each.key: getattr(first, each.key) for each in Job.__table__.columns}
        row = {key: value for key, value in columns.items() if value is not None}
        orders = [vars(self._order(name, number)) for number in range(1, count)]
        rows = [{**row, "id": each["job_id"], **{k: each[k] for k in ("holder", "spec", "team")}} for each in orders]
        with self.store.transaction() as session:
            session.execute(insert(Job), rows)
            session.execute(update(Job).where(Job.id.startswith(f"{name}-")).values(**values))

    async def _begin_waits(self) -> dict[str, list[Any]]:
        numbers = range(self.load.deferred)
        of_jobs = [
            JobTrigger(job_id=self._left[number % len(self._left)].job_id, attempt=1, submissions=1, task_try=1)
            for number in numbers
        ]
        pools = [self.names[number % len(self.names)] for number in numbers]
        of_nodes = [PoolTrigger(pool=pool, holder=f"airflow:b/{pool}", nodes=_NODES + 1) for pool in pools]
        return {"jobs": [JobWait(each) for each in of_jobs], "nodes": [PoolWait(each) for each in of_nodes]}

    def _write(self, statement: Update) -> None:
        with self.store.transaction() as session:
            session.execute(statement)

    def round(self) -> None:
        self._kept.active_pools(reconciling.lock_path())
        for name in self.names:
            reconcile(self.store, name, clock=self.clock, reading=self._kept.of(name))

    def settle(self) -> None:
        self.round()
        time.sleep(0.1)  # a file's time is coarse, see `shoal.state.changes`
        self.round()

    def submit(self) -> None:
        self._asked += 1
        job = attempts.ask(self.store, self._order("asked", self._asked), self.clock())
        job_queue.admit(self.store, Key(job.id, 1), self.clock(), {})

    def start_next(self) -> None:
        attempts.end(self.store, self.running.pop(), JobState.SUCCEEDED, self.clock())
        for key in job_queue.look(self.store, self.first).free_for:
            if job_queue.admit(self.store, key, self.clock(), {}) is Admission.NOW:
                attempts.start(self.store, key, ProcessId.mine().to_json(), self.clock())
                self.running.append(key)

    def operations(self) -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
        """What is measured, and what is done before each time."""
        store, one = self.store, lambda: reconcile(self.store, self.first, clock=self.clock)
        resize = update(Demand).where(Demand.pool == self.first).values(size=2 * _NODES + 1 - Demand.size)
        of_nodes = partial(PoolWait.look_at_all, store, self._waits["nodes"])
        more = update(Demand).values(size=_NODES + 1)  # the node does not come
        change = update(Job).where(Job.id == "runs-0").values(heartbeat_at=func.coalesce(Job.heartbeat_at, 0) + 1)
        return {
            "reconcile a pool, nothing to do": (one, None),
            "reconcile a pool, a node more or less": (one, partial(self._write, resize)),
            "reconciler's round, nothing has changed": (self.round, self.settle),
            "reconciler's round, a row has changed": (self.round, partial(self._write, change)),
            "reconciler's look for lost jobs": (lambda: LostJobs().look(store, self.names, object()), None),
            "list the pools": (lambda: list_pools(store), None),
            "describe a pool": (lambda: describe_pool(self.first), None),
            "submit a job": (self.submit, None),
            "a waiter's turn in the queue": (lambda: Waiter(Target(store, self._left[-1], self.first)).round(), None),
            "end a job, start the next": (self.start_next, None),
            "cancel a waiting job": (lambda: jobs.attach(self._left.pop().job_id).cancel(), None),
            "list 100 jobs": (jobs.list_jobs, None),
            "look of 'deferred' at jobs": (partial(JobWait.look_at_all, store, self._waits["jobs"]), None),
            "sweep the pools": (lambda: reconciling.sweep(store, clock=self.clock), None),
            "retention of a pool": (lambda: retain(store, self.first, self.clock()), None),
            "retention of jobs: what is old": (lambda: prune_jobs(dry_run=True, clock=self.clock), None),
            "page: look for changes": (lambda: store_mark(store), None),
            "page: all pools and jobs": (lambda: StoreReader(store).overview(), None),
            "look of 'deferred' at nodes": (of_nodes, partial(self._write, more)),
        }


def measured(act: Callable[[], Any], before: Callable[[], Any] | None) -> tuple[float, int]:
    """Do something several times; return the median of its CPU in ms, without the first time, and its statements."""
    found = []
    for _ in range(_REPEATS + 1):
        if before:
            before()
        with statements() as seen:
            began = time.process_time()
            act()
            cpu = time.process_time() - began
        found.append(1000 * cpu)
    return statistics.median(found[1:]), len(seen)


def grown(name: str, largest: int) -> list[list[str]]:
    """Let one number grow up to its largest, and return a row of figures for each operation."""
    sizes = [max(2, largest // 4), max(2, largest // 2), largest]
    found: dict[str, list[tuple[float, int]]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="si-") as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOAL_HOME", folder)
            patch.setattr(LocalOptions, "backend_class", f"{__name__}:FakeBackend")
            patch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
            clock = clocks.installed(patch)
            world = World(replace(Load(), **{name: size}), clock)
            for number, (what, (act, before)) in enumerate(world.operations().items()):
                clock.pass_to(60.0 * number)
                found.setdefault(what, []).append(measured(act, before))
    rows = []
    for what, figures in found.items():
        (least, few), *_, (most, many) = figures
        growth = math.log(most / least) / math.log(sizes[-1] / sizes[0])
        rows.append([what, *(f"{cpu:.1f}" for cpu, _ in figures), f"{growth:.2f}", f"{few}", f"{many}"])
    return [[name, *(f"{size}, ms" for size in sizes), "growth", "first SQL", "last SQL"], *rows]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Simulate many pools, jobs and waits on one store.")
    parser.add_argument("--share", type=float, default=1.0, help="part of the largest numbers (default 1)")
    parser.add_argument("--grow", nargs="+", default=list(vars(MOST)), help="which numbers grow (default all)")
    parser.add_argument("--store", choices=["SQLite", "PostgreSQL"], default="SQLite", help="default SQLite")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    for name in args.grow:
        with contextlib.ExitStack() as stack:
            os.environ.pop("SHOAL_STATE_URL", None)
            if args.store == "PostgreSQL":
                os.environ["SHOAL_STATE_URL"] = stack.enter_context(postgresql(0))
            head, *rows = grown(name, max(4, round(getattr(MOST, name) * args.share)))
        print(table(head, rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
