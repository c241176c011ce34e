"""A thousand deferred tasks in one triggerer: how much memory and CPU does each take?

Airflow's own runner of triggers runs in a process of its own, with as many triggers as deferred tasks would have left
there. Another process stands for the drivers of the jobs: every five seconds it writes a sign of life of each job, and
a line into the log of every second job. The sensors wait for the second node of one pool.

Idle is the same process without triggers. Memory is PSS (see `process_tree`). CPU is that of the triggers' process. The
loop's delay is how much later than asked a coroutine was woken that sleeps 50 ms, so how long triggers keep others
waiting. Then all jobs end, or the node is there, and the time is taken until the last trigger has fired.

Run it with ``python -m tests.benchmarks.deferred_waits``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from tests.benchmarks.process_tree import tree_bytes
from tests.benchmarks.report import table

KINDS = ("trainings", "sensors")
_HEARTBEAT_S = 5.0
_WARM_S = 20.0
"""Seconds from the start of the triggers until the measurement; each row has been read several times then."""


def _add_rows(jobs: int) -> None:
    """Add a pool that is up, whose second node is awaited, and the rows and logs of running jobs."""
    from shoal.jobs.files.logs import log_path
    from shoal.jobs.journal import attempts
    from shoal.jobs.journal.attempts import Key, Order
    from shoal.jobs.journal.owners import TaskTry
    from shoal.os_processes import ProcessId
    from shoal.state import Store
    from shoal.state.schema import Demand
    from tests.support.job_store import POOL, add_node, add_pool

    store = Store()
    add_pool(store)
    add_node(store, cpus=1)
    with store.transaction() as session:
        session.add(Demand(pool=POOL, size=2, set_at=time.time()))
    for number in range(jobs):
        key = Key(f"job-{number}", 1)
        task = TaskTry(f"train/{number}", 1)
        order = Order(key.job_id, POOL, "airflow:bench/run", {"fingerprint": str(number)}, {}, 900.0, task=task)
        attempts.ask(store, order, time.time())
        attempts.start(store, key, ProcessId.mine().to_json(), time.time())
        log_path(key).parent.mkdir(parents=True)


def _live(jobs: int, turn: int) -> None:
    """Write what the drivers of the jobs write."""
    from sqlalchemy import update

    from shoal.jobs.files.logs import log_path
    from shoal.jobs.journal.attempts import Key
    from shoal.state import Store
    from shoal.state.schema import Job

    with Store().transaction() as session:
        session.execute(update(Job).values(heartbeat_at=time.time()))
    for number in range(turn % 2, jobs, 2):
        with log_path(Key(f"job-{number}", 1)).open("a") as log:
            log.write(f"round {turn}: rmse 0.5\n")


def _end() -> None:
    """Let all jobs succeed, and the second node be there."""
    from sqlalchemy import update

    from shoal.state import Store
    from shoal.state.schema import Job, JobState, Node, NodeState
    from tests.support.job_store import POOL

    with Store().transaction() as session:
        session.execute(update(Job).values(state=JobState.SUCCEEDED, ended_at=time.time()))
        session.add(
            Node(
                id="1123456789", pool=POOL, name=f"{POOL}-1", is_head=False, state=NodeState.READY, epoch=1, cpus=1,
                gpus=0, endpoint={}, busy=False, start_deadline=0.0, created_at=0.0,
            )
        )  # fmt: skip


def _triggers(kind: str, waits: int) -> list[Any]:
    from shoal.airflow.triggers import JobTrigger, PoolTrigger
    from tests.support.job_store import POOL

    if kind == "sensors":
        return [PoolTrigger(pool=POOL, holder=f"airflow:bench/{number}", nodes=2) for number in range(waits)]
    return [JobTrigger(job_id=f"job-{number}", attempt=1, submissions=1, task_try=1) for number in range(waits)]


async def _note_delays(found: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.05)
        found.append(time.perf_counter() - began - 0.05)


async def _run_triggers(kind: str, waits: int, seconds: float) -> None:
    """Be the triggerer: print the figures of the waits, read a line, and print when all triggers have fired."""
    from airflow.jobs.triggerer_job_runner import TriggerRunner

    from shoal.airflow.triggers import poller

    triggers = _triggers(kind, 1)  # what idle triggerers have imported
    poller()
    runner = TriggerRunner()
    await asyncio.sleep(1)
    idle = tree_bytes(os.getpid())
    triggers = _triggers(kind, waits)
    for number, trigger in enumerate(triggers):
        trigger.task_instance = SimpleNamespace(
            id=number, dag_id="bench", task_id="train", run_id="run", try_number=1, map_index=number,
            context_carrier=None,
        )  # fmt: skip
        name = f"bench/run/train/{number}"
        runner.triggers[number] = {"is_watcher": False, "name": name, "events": 0, "task": None}
        runner.triggers[number]["task"] = asyncio.create_task(runner.run_trigger(number, trigger), name=name)
    await asyncio.sleep(_WARM_S)
    delays: list[float] = []
    looking = asyncio.create_task(_note_delays(delays))
    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu = (time.process_time() - cpu) / (time.perf_counter() - began)
    looking.cancel()
    memory = tree_bytes(os.getpid()) - idle
    waiting = sum(not details["task"].done() for details in runner.triggers.values())
    _tell({"idle": idle, "memory": memory, "cpu": cpu, "delay": max(delays), "waiting": waiting})
    await asyncio.to_thread(sys.stdin.readline)
    began = time.perf_counter()
    await asyncio.gather(*(details["task"] for details in runner.triggers.values()))
    _tell({"ended": time.perf_counter() - began, "fired": sum(one["events"] for one in runner.triggers.values())})


def _tell(figures: dict[str, float]) -> None:
    print(json.dumps(figures), file=sys.__stdout__, flush=True)


def _figures(line: str) -> dict[str, float] | None:
    """The figures in a line of the triggers' process; None if it is a line of Airflow's log."""
    with suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) and ("memory" in found or "fired" in found) else None
    return None


def measure(kind: str, waits: int, seconds: float) -> list[str]:
    """Run one kind of waits and return a row of figures."""
    jobs = waits if kind == "trainings" else 0
    _add_rows(jobs)
    command = [sys.executable, "-m", "tests.benchmarks.deferred_waits", "--triggers", kind]
    command += ["--waits", str(waits), "--seconds", str(seconds)]
    environment = {**os.environ, "AIRFLOW_HOME": os.environ["SHOAL_HOME"], "AIRFLOW__CORE__UNIT_TEST_MODE": "False"}
    with open(f"{os.environ['SHOAL_HOME']}/triggers.log", "w+") as output:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)
        found: dict[str, float] = {}
        turn, is_told, read = 0, False, 0
        next_turn = time.monotonic()
        while child.poll() is None:
            if time.monotonic() >= next_turn and not is_told:
                _live(jobs, turn)
                turn, next_turn = turn + 1, time.monotonic() + _HEARTBEAT_S
            output.seek(read)
            for line in output:
                found |= _figures(line) or {}
            read = output.tell()
            if "memory" in found and not is_told:
                assert child.stdin is not None
                child.stdin.write(b"end\n")
                child.stdin.flush()
                _end()
                is_told = True
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
        output.seek(read)
        for line in output:
            found |= _figures(line) or {}
        output.seek(0)
        log = output.read()
        failed = child.returncode or "could not be read" in log or "Traceback" in log
        if failed or found.get("fired") != waits or found.get("waiting") != waits:
            wrong = log.partition("Traceback")
            raise SystemExit(f"{kind}: {found}, exit status {child.returncode}\n{wrong[0][-1000:]}{wrong[2][:3000]}")
    mb = 2**20
    return [
        kind, f"{found['idle'] / mb:.0f}", f"{found['memory'] / mb:.0f}", f"{found['memory'] / waits / 1024:.0f}",
        f"{100 * found['cpu']:.0f}", f"{1000 * found['cpu'] / waits:.2f}", f"{1000 * found['delay']:.0f}",
        f"{found['ended']:.1f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure deferred tasks in a triggerer.")
    parser.add_argument("--waits", type=int, default=1000, help="deferred tasks (default 1000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long CPU is measured (default 60)")
    parser.add_argument("--triggers", choices=KINDS, help="be the process with these triggers")
    args = parser.parse_args(argv)
    if args.triggers:
        return asyncio.run(_run_triggers(args.triggers, args.waits, args.seconds))
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="dw-") as folder:
            os.environ["SHOAL_HOME"] = f"{folder}/home"
            os.environ.pop("SHOAL_STATE_URL", None)
            rows.append(measure(kind, args.waits, args.seconds))
    head = [f"{args.waits} deferred", "idle MB", "above idle MB", "KB each", "CPU, % of one", "ms/s each",
            "longest delay of the loop, ms", "all fired after s"]  # fmt: skip
    print(table(head, rows), flush=True)
    return None


if __name__ == "__main__":
    main()
