"""PyTorch on warm clusters: shoal against torchrun, Ray Train and PySpark's TorchDistributor, and rows into the loop.

Every side is a process of its own whose cluster is up, and has trained once before it is measured. They take turns, so
that a busy machine slows all alike, and only one is up at a time, so that idle clusters take nothing from it. Memory is
that of the side's whole process tree, its cluster included.

Run it with ``python -m tests.benchmarks.pytorch``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median

from tests.benchmarks import launchers, torch_rows
from tests.benchmarks.datasets import Data, synthetic
from tests.benchmarks.ddp import BATCH_ROWS, FEATURES
from tests.benchmarks.launchers import Ran, Run
from tests.benchmarks.report import table
from tests.benchmarks.side import Side
from tests.benchmarks.turns import Taken, take_turns

TORCHRUN = "torchrun"
SIDES: dict[str, Callable[[int], AbstractContextManager[Run]]] = {
    TORCHRUN: launchers.torchrun,
    "shoal, a pool's job": launchers.shoal_pool,
    "shoal, in a Ray cluster": launchers.shoal,
    "Ray Train": launchers.ray_train,
    "TorchDistributor": launchers.spark,
    "TorchDistributor, local mode": launchers.spark_driver,
}
WAYS = (torch_rows.IN_MEMORY, torch_rows.AT_ONCE, torch_rows.COLUMNS, torch_rows.STACKED)
_ONCE = ("Ray Train", "TorchDistributor", "TorchDistributor, local mode")
"""Sides with one turn: theirs take a minute, and their steps need not be told from torchrun's as finely as shoal's."""
_WARMING_STEPS = 1
_ROWS_TURNS = 3


def rates(taken: Taken[Ran]) -> list[float]:
    """Steps per second of each turn."""
    return [turn.steps_per_second for turn in taken.turns]


def measure(names: Sequence[str], workers: int, steps: int, repeat: int) -> dict[str, Taken[Ran]]:
    """Train with every side, in turns.

    Args:
        names: The sides.
        workers: Processes that train.
        steps: Steps that are timed.
        repeat: Turns of torchrun and shoal; the others have one.
    """
    sides = {name: partial(Side, SIDES[name], workers) for name in names}
    return take_turns(sides, _WARMING_STEPS, steps, repeat, once=_ONCE)


def show(taken: dict[str, Taken[Ran]], workers: int, steps: int) -> str:
    """A table of all sides, in Markdown."""
    torchrun = taken.get(TORCHRUN)
    against = median(rates(torchrun)) if torchrun and torchrun.failure is None else None
    rows = []
    for name, side in taken.items():
        if side.failure is not None:
            rows.append([name, "failed", side.failure.splitlines()[0][:60], "", "", "", "", ""])
            continue
        steps_per_second = rates(side)
        rows.append(
            [
                name,
                f"{median(turn.first_step for turn in side.turns):.1f}",
                f"{median(turn.function for turn in side.turns):.1f}",
                f"{median(turn.seconds for turn in side.turns):.1f}",
                f"{median(steps_per_second):.1f}",
                f"{min(steps_per_second):.0f} to {max(steps_per_second):.0f}",
                f"{median(steps_per_second) / against:.2f}" if against else "",
                f"{side.peak_bytes >> 20:,}",
            ]
        )
    head = [f"DDP, {workers} workers, {steps} steps", "s to first step", "to the function", "s of the call", "steps/s",
            "least to most", "x torchrun", "peak MiB"]  # fmt: skip
    return table(head, rows)


def loop(data: Data, repeat: int) -> str:
    """A table of the rows per second that come into the loop, each the best of the turns."""
    best: dict[tuple[str, bool], float] = {}
    side = Side(torch_rows.loops, data)
    try:
        for _ in range(repeat):
            for asked in ((way, shuffle) for way in WAYS for shuffle in (False, True)):
                best[asked] = max(best.get(asked, 0.0), side.ask(asked))
    finally:
        side.close()
    rows = []
    for way in WAYS:
        cells = []
        for shuffle in (False, True):
            rate = best[way, shuffle]
            cells += [f"{rate:,.0f}", f"{rate / best[torch_rows.IN_MEMORY, shuffle]:.2f}"]
        rows.append([way, *cells])
    return table([f"{data.name}, batches of {BATCH_ROWS:,}", "rows/s", "x", "shuffled, rows/s", "x"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time PyTorch's start, steps and rows against every peer.")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES), help="sides (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed (default 300)")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows that are read; 0: none (default 1,000,000)")
    parser.add_argument("--repeat", type=int, default=5, help="turns, of which the median counts (default 5)")
    args = parser.parse_args(argv)
    if args.sides:
        taken = measure(args.sides, args.workers, args.steps, args.repeat)
        print(show(taken, args.workers, args.steps), end="\n\n", flush=True)
    if args.rows:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            name = f"{args.rows / 1e6:g} M x {FEATURES}"
            print(
                loop(
                    synthetic(Path(folder, "rows"), name, args.rows, FEATURES, rounds=0), min(args.repeat, _ROWS_TURNS)
                )
            )


if __name__ == "__main__":
    main()
