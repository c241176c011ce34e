"""How time and memory move with the number of workers on one machine, with one thread each by default.

Run it with ``python -m tests.benchmarks.workers``. With ``--data flights --workers 1x2 2``, it compares one worker of
two threads with two workers of one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tests.benchmarks import peers
from tests.benchmarks.datasets import MAKE, Data, small
from tests.benchmarks.peers import Library, Trained
from tests.benchmarks.report import table
from tests.benchmarks.side import Side


def measure(library: Library, workers: int, threads: int, warming: Data, data: Data, repeat: int) -> Trained:
    """The fastest of a few trainings on a warm gang."""
    side = Side(peers.shoal, library, workers, False, threads)
    try:
        side.ask(warming)
        turns: list[Trained] = [side.ask(data) for _ in range(repeat)]
    finally:
        side.close()
    return min(turns, key=lambda turn: turn.seconds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time training with more and more workers on one machine.")
    parser.add_argument("--data", choices=MAKE, default="2m", help="dataset (default 2m)")
    parser.add_argument("--workers", nargs="+", default=["1", "2", "4"], help="numbers, or WORKERSxTHREADS")
    parser.add_argument("--repeat", type=int, default=3, help="turns, of which the fastest counts (default 3)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        data, warming = MAKE[args.data](Path(folder)), small(Path(folder) / "january")
        for library in get_args(Library):
            rows = []
            for size in args.workers:
                workers, _, threads = size.partition("x")
                best = measure(library, int(workers), int(threads or 1), warming, data, args.repeat)
                slowest = [max(getattr(worker, part) for worker in best.workers)
                           for part in ("read_seconds", "quantise_seconds", "train_seconds")]  # fmt: skip
                grown = [worker.peak_rss_bytes - worker.idle_rss_bytes for worker in best.workers]
                rows.append([size, *(f"{seconds:.1f}" for seconds in (best.seconds, *slowest)),
                             f"{max(grown) >> 20:,}", f"{sum(grown) >> 20:,}"])  # fmt: skip
            head = [f"{library}, {data.name}: workers", "seconds", "read", "quantise", "train",
                    "MiB above idle, largest", "all"]  # fmt: skip
            print(table(head, rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
