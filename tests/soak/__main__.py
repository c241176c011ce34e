"""``make soak``: kills at random instants of every operation on a pool of real Ray nodes, and a look at what is left.

``python -m tests.soak --rounds 50 --seed 1``; ``--scale-ups 20`` grows a pool 1 -> 4 that often in a row instead.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.session_leftovers import remove_home


def soak(rounds: int, seed: int) -> int:
    """Returns how many rounds failed."""
    from shoal.pool.api import ComputePool
    from tests.soak import rounds as rounds_
    from tests.soak.actor import HOLDER, URI
    from tests.support.node_leftovers import Watch

    dice, watch = random.Random(seed), Watch()
    outcomes: list[rounds_.Outcome] = []
    ComputePool(URI, holder=HOLDER).up()
    for number in range(1, rounds + 1):
        case = rounds_.Case.draw(dice, rounds_.claims())
        outcome = rounds_.run(case, dice, watch)
        outcomes.append(outcome)
        print(
            f"{number:3} {case!s:34} SIGKILL to {outcome.killed} at {case.after:.2f} s; the actor: "
            f"{outcome.actor[:60]}; {outcome.nodes} nodes after {outcome.seconds:.1f} s"
            + (f"\n    FAILED: {outcome.problem}" if outcome.problem else ""),
            flush=True,
        )
    ComputePool(URI).down()
    left = watch.left_over()
    print("\nafter the last down(): " + ("; ".join(left) or "nothing left"))
    _table("operation", outcomes, lambda outcome: outcome.case.operation)
    _table("killed", outcomes, lambda outcome: outcome.victim)
    return sum(outcome.problem is not None for outcome in outcomes) + bool(left)


def _table(title: str, outcomes: Sequence, by: Callable) -> None:
    print(f"\n{title:16} {'rounds':>7} {'good':>6} {'median s':>9} {'max s':>7}")
    for name in [*sorted({by(outcome) for outcome in outcomes}), "all"]:
        those = [outcome for outcome in outcomes if name in ("all", by(outcome))]
        good = sum(outcome.problem is None for outcome in those)
        seconds = [outcome.seconds for outcome in those]
        print(f"{name:16} {len(those):7} {good:6} {statistics.median(seconds):9.1f} {max(seconds):7.1f}")


def scale_ups(count: int) -> int:
    """Returns how many of so many scale-ups in a row failed."""
    from shoal.errors import ShoalError
    from shoal.pool.api import ComputePool
    from tests.soak.actor import URI
    from tests.support.node_leftovers import Watch

    watch, seconds, failed = Watch(), [], 0
    pool = ComputePool(URI).up()
    for number in range(1, count + 1):
        began = time.monotonic()
        try:
            pool.scale(4)
        except ShoalError as error:
            failed += 1
            print(f"{number:3} FAILED: {error}", flush=True)
        else:
            seconds.append(time.monotonic() - began)
            print(f"{number:3} 1 -> 4 in {seconds[-1]:.1f} s", flush=True)
        watch.look()
        pool.scale(1)
        if left := watch.left_over():
            failed += 1
            print("    FAILED: left over: " + "; ".join(left), flush=True)
    pool.down()
    spread = f", median {statistics.median(seconds):.1f} s, max {max(seconds):.1f} s" if seconds else ""
    print(f"\n{len(seconds)} of {count} scale-ups 1 -> 4 succeeded{spread}")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="rounds with a kill each (default 50)")
    parser.add_argument("--seed", type=int, default=None, help="what the rounds are drawn from (default: a new one)")
    parser.add_argument("--scale-ups", type=int, default=0, help="grow 1 -> 4 so often in a row, and kill nobody")
    args = parser.parse_args(argv)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    folder = Path(tempfile.mkdtemp(prefix="shoal-soak-"))
    for name in ("SHOAL_POOL", "SHOAL_STATE_URL", "RAY_ADDRESS"):
        os.environ.pop(name, None)
    os.environ["SHOAL_HOME"] = str(folder)
    print(
        f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} CPUs ({platform.machine()}), Python "
        f"{platform.python_version()}, ray {importlib.metadata.version('ray')}, "
        + (f"{args.scale_ups} scale-ups" if args.scale_ups else f"{args.rounds} rounds, --seed {seed}"),
        flush=True,
    )
    failed = scale_ups(args.scale_ups) if args.scale_ups else soak(args.rounds, seed)
    if failed:
        print(f"\n{failed} FAILED; the home is kept for a look: {folder}")
        return 1
    remove_home(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
