"""A process that changes a pool and dies by SIGKILL at one point of one journal step.

For tiny pools it is forked, which saves a second of imports each of many times; for real ones it is
``python -m tests.support.killed_pool_operations POOL OPERATION POINT``, because what has used Ray should not be forked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from shoal.errors import ScaleError
from shoal.pool.api import ComputePool, sweep_nodes
from shoal.pool.journal.rows import At, JournalStep
from shoal.state import Store, store

ROOT = Path(__file__).parents[2]
HOLDER = "test:act"
SHORT = 1.5
"""Seconds after which an operation rolls back whose nodes do not come; a busy machine has its first intents by then."""

ACTS = frozenset({JournalStep.START, JournalStep.END, JournalStep.CLEAR})
"""Steps that are no transaction, and have no point in the middle."""


def points(*of: JournalStep) -> list[str]:
    """All points of some steps, as ``"written intend"``."""
    return [f"{at} {step}" for step in of for at in At if not (step in ACTS and at is At.WRITTEN)]


def interrupt(_: object) -> NoReturn:
    raise KeyboardInterrupt


OPERATIONS: dict[str, Callable[[ComputePool], object]] = {
    "bringing up": ComputePool.up,
    "growing": lambda pool: pool.scale(3),
    "shrinking": lambda pool: pool.scale(1),
    "rolling back": lambda pool: pool.scale(3, options={"rollback_after_seconds": SHORT}),
    "giving up": lambda pool: pool.scale(3, on_progress=interrupt),
    "leasing": lambda pool: pool.lease(2, bring_up=True),
    "releasing": ComputePool.release,
    "queueing": lambda pool: pool.lease(
        3, exclusive=True, options={"rollback_after_seconds": 3 * SHORT}, on_progress=interrupt
    ),
    "handing over": ComputePool.release,
    "taking down": ComputePool.down,
    "sweeping": lambda _: sweep_nodes(Store()),
}


def fork(pool: str, operation: str, die_at: str) -> list[str] | None:
    """Carry out an operation in a fork; None where it was killed, else the points that it went through."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            said = "\n".join(carry_out(pool, operation, die_at))
            os.write(writing, said.encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"{operation} ended with {code}"
    return None if code else said.splitlines()


def run(pool: str, operation: str, die_at: str) -> list[str] | None:
    """The same in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_pool_operations", pool, operation, die_at],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), f"{operation} ended with {done.returncode}"
    return None if done.returncode else done.stdout.splitlines()


def carry_out(pool: str, operation: str, die_at: str) -> list[str]:
    """The points that it went through, unless it died."""
    seen: dict[str, None] = {}

    def passing(step: JournalStep, at: At) -> None:
        seen[point := f"{at} {step}"] = None
        if point == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    store.passing = passing
    with suppress(ScaleError, KeyboardInterrupt):  # rolled back, which takes its steps too
        OPERATIONS[operation](ComputePool(pool, holder=HOLDER))
    return list(seen)


def main() -> None:
    from shoal.pool import reconciling

    reconciling.ensure_running = lambda: None  # whoever acts or sweeps does it all
    print("\n".join(carry_out(*sys.argv[1:4])))


if __name__ == "__main__":
    main()
