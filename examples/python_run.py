"""Run the flight retraining example from plain Python: ``python -m examples.python_run`` (`make run-python`).

The program grows a pool from 1 to 3 nodes, and trains a model on the flights of all months before the given month. The
model is then compared with the champion (the registered version in use) on the given month, and becomes the champion if
it is better. At the end the pool goes down, even after an error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.errors import ShoalError
from shoal.examples.flights import MODEL, POOL, retraining_spec
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.status import PoolStatus
from shoal.state.home import home, open_locked, subfolder

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult

INTERRUPTED = 130
"""Exit code after Ctrl-C: shells use 128 + the number of the signal, and SIGINT is 2."""

console = Console(highlight=False, soft_wrap=True)


class Timeline:
    """Object that records the number of a pool's nodes over time, and prints each change."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.points: list[tuple[float, int]] = []

    def seconds(self) -> float:
        """Return the seconds since this object was created."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Print `text`, preceded by the seconds since this object was created."""
        console.print(f"[dim]{self.seconds():6.1f} s[/]  {text}")

    def update(self, status: PoolStatus) -> None:
        """Record and print the number of active nodes if the number has changed."""
        active = len(status.active)
        if not self.points or self.points[-1][1] != active:
            self.points.append((self.seconds(), active))
            self.say(f"nodes {'#' * active}{'.' * (status.target - active)} {active} of {status.target}")


def retrain(month: int, rounds: int) -> JobResult:
    """Retrain the flight delay model on a pool, and print a summary.

    Raises:
        ShoalError: A step failed. The pool has been taken down.
    """
    from shoal.jobs.submission import submit

    timeline = Timeline()
    timeline.say("preparing the flights of 2013 with their weather, by month")
    spec = retraining_spec(month, n_estimators=rounds)
    pool = ComputePool(POOL)
    timeline.say(f"bringing up the pool {pool.name}")
    # This process is the pool's owner, so that the pool goes down by itself if this process is killed.
    pool.up(on_progress=timeline.update, owner=ProcessId.mine())
    try:
        timeline.update(pool.describe())
        timeline.say("scaling 1 -> 3")
        pool.scale(3, on_progress=timeline.update)
        timeline.update(pool.describe())
        timeline.say(f"training on months 1 to {month - 1}, evaluating on month {month}")
        handle = submit(spec.on_pool(pool.name))
        result = handle.wait(on_log=lambda line: console.print(line, markup=False, style="dim"))
        timeline.say("scaling 3 -> 1")
        pool.scale(1, on_progress=timeline.update)
        timeline.update(pool.describe())
    finally:
        timeline.say("taking the pool down")
        pool.down()
    timeline.update(pool.describe())
    check_model_loads(result)
    summary(timeline, month, result, "examples.python_run")
    return result


def check_model_loads(result: JobResult) -> None:
    """Check that the model version that a job has registered exists and can be loaded.

    Raises:
        ShoalError: The model has no boosting rounds.
        mlflow.MlflowException: The model does not exist.
    """
    import mlflow

    from shoal.jobs.files.storage import default_uri

    mlflow.set_tracking_uri(default_uri())
    model = mlflow.xgboost.load_model(f"models:/{MODEL}/{result.model_version}")
    if model.num_boosted_rounds() < 1:
        raise ShoalError(f"version {result.model_version} of the model {MODEL} is empty: it has no boosting rounds")


def summary(timeline: Timeline, month: int, result: JobResult, module: str) -> None:
    """Print a summary of the retraining."""
    table = Table(title="Retraining", show_header=False, title_justify="left")
    rows: list[tuple[str, Any]] = [
        ("nodes over time", ", ".join(f"{nodes} at {when:.0f} s" for when, nodes in timeline.points)),
        ("rows trained on", f"{result.rows:,} by {result.num_workers} workers in {result.seconds:.1f} s"),
        *((name, f"{value:.4f}") for name, value in sorted(result.metrics.items())),
        ("champion before", _champion(result)),
        ("verdict", "promoted" if result.promoted else "kept the champion"),
        ("model", f"models:/{MODEL}/{result.model_version}"),
        ("file", result.model_path),
        ("digest", (result.model_digest or "-")[:16]),
        ("MLflow run", result.mlflow_run_id or "-"),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    console.print(table)
    tools = Path(os.path.relpath(sys.executable)).parent
    console.print(f"Next: `{tools}/shoal jobs show {result.job_id}`, `{tools}/shoal jobs logs {result.job_id}`,")
    console.print(f"      `{tools}/mlflow ui --backend-store-uri sqlite:///{home()}/mlflow/mlflow.db`,")
    console.print(f"      or for another month: python -m {module} --month {max(2, month - 1)}")


def _champion(result: JobResult) -> str:
    return f"version {result.champion.version} ({result.champion.value:.4f})" if result.champion else "none"


def run_alone(work: Callable[[], object], *, farewell: str, lock: str = "flights") -> int:
    """Run an example, unless another process is already running it; print errors, and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM stops the example cleanly, as Ctrl-C does.
    with open_locked(subfolder("examples") / f"{lock}.lock", wait=False) as locked:
        if not locked:
            console.print(
                "[red]error:[/] another run of this example with the same SHOAL_HOME is in progress: wait for its end"
            )
            return 1
        try:
            work()
        except ShoalError as error:
            # The text is escaped, because Rich would otherwise take texts such as "[rank 1 …]" for markup and hide
            # them.
            console.print(f"[red]error:[/] {escape(str(error))}")
            return 1
        except KeyboardInterrupt:
            console.print(f"interrupted: {farewell}")
            return INTERRUPTED
    return 0


def command_line(description: str) -> argparse.ArgumentParser:
    """Return the parser of an example's command line, with the options ``--month`` and ``--rounds``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--month",
        type=int,
        default=12,
        help="month to evaluate on, from 2 to 12; the model is trained on all months before it",
    )
    parser.add_argument("--rounds", type=int, default=100, help="number of boosting rounds")
    return parser


def main() -> int:
    """Run the example, and return the exit code: 0 only if the new model exists and can be loaded."""
    arguments = command_line("Retrain the flight delay model on a local pool.").parse_args()
    return run_alone(
        lambda: retrain(arguments.month, arguments.rounds), farewell="the job was cancelled and the pool is down"
    )


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
