"""The main job, in one command: ``python -m shoal.examples.flights`` (what `make run-python` calls).

A pool grows from 1 to 3 nodes, trains on the flights of the months so far, evaluates champion and challenger on the
next month, promotes or keeps, and shrinks again. Whatever happens on the way, nothing is left running.
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
from shoal.examples.flights_data import FEATURES, LABEL, month_files
from shoal.pool.api import ComputePool
from shoal.pool.status import PoolStatus
from shoal.state.home import home, subfolder
from shoal.state.locks import open_locked
from shoal.state.process import ProcessId

if TYPE_CHECKING:
    from shoal.jobs.spec import JobResult, JobSpec

MODEL = "flight-delays"
POOL = "local://flights?max_nodes=4"
PARAMS = {"objective": "reg:squarederror", "eta": 0.1, "max_depth": 8, "subsample": 0.9, "eval_metric": "rmse"}

INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as shells have it."""

console = Console(highlight=False, soft_wrap=True)


def retraining_spec(month: int, *, n_estimators: int = 100) -> JobSpec:
    """The training that learns from the months before `month` and is judged on it.

    Args:
        month: 2 to 12.
        n_estimators: Rounds of boosting.

    Raises:
        InvalidArgumentError: A month with nothing before it.
    """
    from shoal.data import DataConnector
    from shoal.errors import InvalidArgumentError
    from shoal.jobs.spec import JobSpec

    if not 2 <= month <= 12:
        raise InvalidArgumentError(f"month {month}: 2 to 12, because the months before it are learned from")
    return JobSpec.parse(
        {
            "dataset": DataConnector.from_parquet(month_files(range(1, month))),
            "input_cols": FEATURES,
            "label_col": LABEL,
            "params": PARAMS,
            "n_estimators": n_estimators,
            "register": {
                "model": MODEL,
                "metric": "rmse",
                "holdout": DataConnector.from_parquet(month_files([month])),
            },
            "tracking": {"experiment": MODEL, "run_name": f"until 2013-{month - 1:02}"},
        }
    )


class Timeline:
    """How many nodes there were when; prints each change as it comes."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.points: list[tuple[float, int]] = []

    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Print a line with its time."""
        console.print(f"[dim]{self.seconds():6.1f} s[/]  {text}")

    def look(self, status: PoolStatus) -> None:
        """Note the nodes that are active now."""
        active = len(status.active)
        if not self.points or self.points[-1][1] != active:
            self.points.append((self.seconds(), active))
            self.say(f"nodes {'#' * active}{'.' * (status.target - active)} {active} of {status.target}")


def retrain(month: int, rounds: int) -> JobResult:
    """Run the whole job, with its summary.

    Raises:
        ShoalError: Whatever went wrong; the pool is down again by then.
    """
    from shoal.jobs.submission import submit

    timeline = Timeline()
    timeline.say("preparing the flights of 2013 with their weather, by month")
    spec = retraining_spec(month, n_estimators=rounds)
    # Embedded in this process: even if it is killed, the pool goes.
    pool = ComputePool(POOL)
    timeline.say(f"pool {pool.name} comes up")
    pool.up(on_progress=timeline.look, owner=ProcessId.mine())
    try:
        timeline.look(pool.describe())
        timeline.say("scaling 1 -> 3")
        pool.scale(3, on_progress=timeline.look)
        timeline.look(pool.describe())
        timeline.say(f"training on months 1 to {month - 1}, judged on month {month}")
        run_config = spec.run_config.model_copy(update={"pool_name": pool.name})
        handle = submit(spec.model_copy(update={"run_config": run_config}))
        result = handle.wait(on_log=lambda line: console.print(line, markup=False, style="dim"))
        timeline.say("scaling 3 -> 1")
        pool.scale(1, on_progress=timeline.look)
        timeline.look(pool.describe())
    finally:
        timeline.say("pool goes down")
        pool.down()
    timeline.look(pool.describe())
    check_it_loads(result)
    summary(timeline, month, result, "shoal.examples.flights")
    return result


def check_it_loads(result: JobResult) -> None:
    """The model has to exist and load where the summary says it is.

    Raises:
        ShoalError: It does not.
    """
    import mlflow

    from shoal.jobs.mlflow.tracking import default_uri

    mlflow.set_tracking_uri(default_uri())
    model = mlflow.xgboost.load_model(f"models:/{MODEL}/{result.model_version}")
    if model.num_boosted_rounds() < 1:
        raise ShoalError(f"version {result.model_version} of {MODEL} is empty")


def summary(timeline: Timeline, month: int, result: JobResult, module: str) -> None:
    """Print what came of it.

    Args:
        timeline: How many nodes there were.
        month: Judged on.
        result: Of the job.
        module: What to run for another month.
    """
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
    console.print(f"Look next: `{tools}/shoal jobs show {result.job_id}`, `{tools}/shoal jobs logs {result.job_id}`,")
    console.print(f"           `{tools}/mlflow ui --backend-store-uri sqlite:///{home()}/mlflow/mlflow.db`,")
    console.print(f"           or the same for another month: python -m {module} --month {max(2, month - 1)}")


def _champion(result: JobResult) -> str:
    return f"version {result.champion.version} ({result.champion.value:.4f})" if result.champion else "none"


def run_alone(work: Callable[[], object], *, farewell: str, lock: str = "flights") -> int:
    """Run the example unless it runs already; returns the exit code.

    Args:
        work: The example.
        farewell: What an interrupt has led to, by the time it is told.
        lock: Examples of the same lock share a pool, and run one at a time.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended politely: the same as Ctrl-C
    with open_locked(subfolder("examples") / f"{lock}.lock", wait=False) as mine:
        if not mine:
            console.print("[red]error:[/] another run of this example is under way with the same SHOAL_HOME")
            return 1
        try:
            work()
        except ShoalError as error:
            console.print(f"[red]error:[/] {escape(str(error))}")  # "[rank 1 …]" is no markup
            return 1
        except KeyboardInterrupt:
            console.print(f"interrupted: {farewell}")
            return INTERRUPTED
    return 0


def main() -> int:
    """Entry point; 0 only if the model exists and loads."""
    parser = argparse.ArgumentParser(description="Retrain the flight delay model on a local pool.")
    parser.add_argument(
        "--month", type=int, default=12, help="the month to judge on, 2 to 12; all before it are learned"
    )
    parser.add_argument("--rounds", type=int, default=100, help="rounds of boosting")
    arguments = parser.parse_args()
    return run_alone(
        lambda: retrain(arguments.month, arguments.rounds), farewell="the job was cancelled and the pool is down"
    )


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
