"""Training on a dataset three times as large as the memory that a worker may have, under a real limit.

The workers' processes get a limit of their data (`RLIMIT_DATA`: all private memory that is mapped for writing) that
leaves them a third of what their dataset takes as float32. XGBoost has to train to the end, and as good a model as it
does in memory; LightGBM, which has no external memory, has to refuse before it reads, with the figures.

Run it with ``python -m tests.benchmarks.limited_memory``.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks import peers
from tests.benchmarks.datasets import Data, small, synthetic
from tests.benchmarks.gradient_boosting import rmse
from tests.benchmarks.peers import Library, Trained
from tests.benchmarks.report import table
from tests.benchmarks.side import Answer, Side, SideError


@dataclass(frozen=True)
class Limit:
    """Asks for a limit of what the workers may have beside what they have.

    Attributes:
        bytes: How much more.
    """

    bytes: int


@contextmanager
def limited(library: Library) -> Iterator[Answer]:
    """One worker, whose memory can be limited."""
    with peers.shoal(library, 1) as fit:

        def answer(request: Data | Limit) -> Trained | int:
            return limit_workers(request.bytes) if isinstance(request, Limit) else fit(request)

        yield answer


def limit_workers(more: int) -> int:
    """Limit the data of this process's gang; returns the limit of a worker in bytes."""
    limit = 0
    for process in psutil.Process().children(recursive=True):
        # Ray gives an actor's process the name of what it runs.
        if process.name().startswith("ray::Worker"):
            limit = process.memory_info().data + more
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))
    return limit


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on three times the memory that a worker may have.")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of 28 features (default 10 M)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of boosting (default 20)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        warming = small(Path(folder) / "january")
        data = synthetic(Path(folder) / "data", f"{args.rows / 1e6:g} M x 28", args.rows, 28, args.rounds)
        rows = []
        third = data.shard_bytes // 3
        for library, room in (("xgboost", None), ("xgboost", third), ("lightgbm", third)):
            rows.append([library, *_run(library, room, warming, data)])
        head = [f"{data.name}, {data.shard_bytes >> 20:,} MiB as float32, {data.rounds} rounds", "limit, MiB",
                "seconds", "peak above idle, MiB", "external", "RMSE"]  # fmt: skip
        print(table(head, rows))


def _run(library: Library, room: int | None, warming: Data, data: Data) -> list[str]:
    side = Side(limited, library)
    try:
        side.ask(warming)
        limit = "none" if room is None else f"{side.ask(Limit(room)) >> 20:,}"
        try:
            trained: Trained = side.ask(data)
        except SideError as error:
            return [limit, f"refused: {error}", "", "", ""]
    finally:
        side.close()
    [worker] = trained.workers
    return [
        limit,
        f"{trained.seconds:.1f}",
        f"{(worker.peak_rss_bytes - worker.idle_rss_bytes) >> 20:,}",
        str(worker.external_memory),
        f"{rmse(trained.model, library, data):.4f}",
    ]


if __name__ == "__main__":
    main()
