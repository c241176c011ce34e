"""Training on a dataset three times as large as the memory that a worker may have, under a real limit.

The worker goes into a control group of its own, as in a container, that leaves it a third of what its dataset takes as
float32; beyond that the kernel kills it. That takes root. XGBoost has to train to the end, and as good a model as it
does in memory; LightGBM, which has no external memory, has to refuse before it reads, with the figures.

Run it with ``python -m tests.benchmarks.limited_memory``.
"""

from __future__ import annotations

import argparse
import os
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

_V1 = Path("/sys/fs/cgroup/memory")


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
    try:
        with peers.shoal(library, 1) as fit:

            def answer(request: Data | Limit) -> Trained | int:
                return limit_workers(request.bytes) if isinstance(request, Limit) else fit(request)

            yield answer
    finally:
        if _group().exists():
            _group().rmdir()


def limit_workers(more: int) -> int:
    """Limit the memory of this process's gang, beside what it has already; returns the limit in bytes."""
    group = _group()
    group.mkdir()
    (group / f"memory.{'limit_in_bytes' if group.is_relative_to(_V1) else 'max'}").write_text(str(more))
    for process in psutil.Process().children(recursive=True):
        # Ray gives an actor's process the name of what it runs. What it has stays on the account of its old group.
        if process.name().startswith("ray::Worker"):
            (group / "cgroup.procs").write_text(str(process.pid))
    return more


def _group() -> Path:
    return (_V1 if _V1.is_dir() else _V1.parent) / f"shoal-bench-{os.getpid()}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on three times the memory that a worker may have.")
    parser.add_argument("--rows", type=int, default=4_000_000, help="rows (default 4 M)")
    # XGBoost keeps some 60 bytes a row in memory, and while it looks for bins 3 MB a feature, whatever is on disk.
    parser.add_argument("--columns", type=int, default=100, help="features (default 100)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of boosting (default 10)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        warming = small(Path(folder) / "january")
        name = f"{args.rows / 1e6:g} M x {args.columns}"
        data = synthetic(Path(folder) / "data", name, args.rows, args.columns, args.rounds)
        rows = []
        third = data.shard_bytes // 3
        for library, room in (("xgboost", None), ("xgboost", third), ("lightgbm", third)):
            rows.append([library, *_run(library, room, warming, data)])
        what = f"{data.name}, {data.shard_bytes >> 20:,} MiB as float32, {data.rounds} rounds"
        head = [what, "limit above idle, MiB", "seconds", "peak above idle, MiB", "external", "RMSE"]
        print(table(head, rows))


def _run(library: Library, room: int | None, warming: Data, data: Data) -> list[str]:
    side = Side(limited, library)
    try:
        side.ask(warming)
        limit = "none" if room is None else f"{side.ask(Limit(room)) >> 20:,}"
        try:
            trained: Trained = side.ask(data)
        except SideError as error:
            print(f"{library}: {error}")
            return [limit, "refused" if "DataError" in str(error) else "failed", "", "", ""]
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
