"""Search for parameters: shoal, and plain Optuna that runs the same trials in as many processes.

Both train XGBoost on the flights, evaluate each trial on a month, and train the best parameters on all rows at the end.
Plain Optuna's processes share a journal in a file, and take the trials from its queue; each process reads the rows and
builds its matrices once. Run it with ``python -m tests.benchmarks.tuning``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.examples.flights import FEATURES, LABEL, month_files
from tests.benchmarks.datasets import Data
from tests.benchmarks.report import table

_SPACE = {
    "max_depth": {"type": "int", "low": 3, "high": 9},
    "learning_rate": {"low": 0.02, "high": 0.4, "log": True},
    "min_child_weight": {"low": 1.0, "high": 50.0},
    "reg_lambda": {"low": 0.1, "high": 10.0, "log": True},
}
_FIXED = {"objective": "reg:squarederror"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time a search for parameters.")
    parser.add_argument("--months", type=int, default=12, help="months of flights, of which the last is the holdout")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20, help="boosting rounds of each trial (default 20)")
    parser.add_argument("--workers", type=int, default=2, help="workers or processes, of one thread each (default 2)")
    parser.add_argument("--repeat", type=int, default=2, help="turns, of which the fastest counts (default 2)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sb-") as name:
        folder = Path(name)
        os.environ["SHOAL_HOME"] = str(folder / "home")
        files = tuple(month_files(range(1, args.months + 1), folder / "data"))
        data = Data("flights", files[:-1], FEATURES, LABEL, files[-1], 0, args.rounds)
        from shoal import ComputePool

        pool = ComputePool(f"local://bench?cpus_per_node={args.workers}&ray=false").up()
        try:
            _ours(data, 2, 2, args.workers)  # the head imports what jobs need
            ours: list[float] = []
            theirs: list[float] = []
            for turn in range(args.repeat):
                seconds, params, value = _ours(data, args.trials, args.rounds, args.workers)
                ours.append(seconds)
                seconds, best = _theirs(data, params, args.rounds, args.workers, folder / f"{turn}.log")
                theirs.append(seconds)
                assert abs(best - value) <= 1e-6 * abs(value), (best, value)
        finally:
            pool.down()
        fastest = min(theirs)
        rows = [
            ["shoal", f"{min(ours):.1f}", f"{min(ours) / fastest:.2f}"],
            ["Optuna in processes", f"{fastest:.1f}", "1.00"],
        ]
        head = [
            f"flights, {args.months - 1} months, {args.trials} trials of {args.rounds} rounds",
            "seconds",
            "x Optuna's time",
        ]
        print(table(head, rows), flush=True)


def _ours(data: Data, trials: int, rounds: int, workers: int) -> tuple[float, list[dict[str, Any]], float]:
    """Search with shoal, and return the seconds, the parameters of all trials and the best value."""
    from shoal.data import DataConnector
    from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
    from shoal.tune import search

    began = time.perf_counter()
    found = search(
        XGBEstimator(rounds, params=_FIXED, scaling_config=XGBScalingConfig(num_workers=1, num_cpu_per_worker=workers)),
        _SPACE,
        DataConnector.from_parquet(list(data.files)),
        input_cols=data.features,
        label_col=data.label,
        holdout=DataConnector.from_parquet(data.judged_by),
        trials=trials,
        sampler="random",
        pruner="none",
        parallel=workers,
        cpus_per_trial=1,
    )
    assert found.model.num_boosted_rounds() == rounds
    seconds = time.perf_counter() - began
    return seconds, [dict(trial.params) for trial in found.study.trials], found.best_value


def _theirs(data: Data, params: list[dict[str, Any]], rounds: int, workers: int, journal: Path) -> tuple[float, float]:
    """Run the same trials with Optuna alone, and return the seconds and the best value."""
    began = time.perf_counter()
    start = multiprocessing.get_context("spawn")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=_storage(journal), study_name="plain")
    for each in params:
        study.enqueue_trial(each)
    shares = [len(params[rank::workers]) for rank in range(workers)]
    processes = [start.Process(target=_process, args=(data, rounds, journal, share)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    import xgboost

    matrix, _ = _matrices(data, workers)
    xgboost.train({**_FIXED, **study.best_params, "nthread": workers, "seed": 0}, matrix, rounds)
    return time.perf_counter() - began, study.best_value


def _process(data: Data, rounds: int, journal: Path, trials: int) -> None:
    import optuna
    import xgboost

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    matrix, holdout = _matrices(data, 1)

    def objective(trial: optuna.Trial) -> float:
        params = {
            "max_depth": trial.suggest_int("max_depth", 3, 9),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.4, log=True),
            "min_child_weight": trial.suggest_float("min_child_weight", 1.0, 50.0),
            "reg_lambda": trial.suggest_float("reg_lambda", 0.1, 10.0, log=True),
        }
        evaluated: dict[str, Any] = {}
        xgboost.train(
            {**_FIXED, **params, "nthread": 1, "seed": 0},
            matrix,
            rounds,
            evals=[(holdout, "holdout")],
            evals_result=evaluated,
            verbose_eval=False,
        )
        value: float = evaluated["holdout"]["rmse"][-1]
        return value

    optuna.load_study(storage=_storage(journal), study_name="plain").optimize(objective, n_trials=trials)


def _matrices(data: Data, threads: int) -> tuple[Any, Any]:
    import pandas as pd
    import xgboost

    columns = [*data.features, data.label]
    rows = pd.concat([pd.read_parquet(file, columns=columns) for file in data.files])
    judged = pd.read_parquet(data.judged_by, columns=columns)
    matrix = xgboost.QuantileDMatrix(rows[list(data.features)], rows[data.label], nthread=threads)
    holdout = xgboost.QuantileDMatrix(judged[list(data.features)], judged[data.label], ref=matrix, nthread=threads)
    return matrix, holdout


def _storage(journal: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(journal)))


if __name__ == "__main__":
    main()
