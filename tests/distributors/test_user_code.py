"""The user's code in every place: what a call returns or raises when this code ends in any way, and that the next call
on the same pool is right.

Right values come from the plain libraries in this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal import ComputePool, RunConfig, many
from shoal.data import DataConnector
from shoal.distributors import distributed
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import ShoalError
from shoal.training.reporting import gang_context
from shoal.tune import search
from tests.support.homes import end_embedded_pools, new_home
from tests.support.pool_processes import nothing_left

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.timeout(900)]

SAID = "said by the user's code"

ERRORS = {
    "raises": f"ValueError: {SAID}",
    "exits": SAID,
    "is interrupted": f"KeyboardInterrupt: {SAID}",
    "ends its process": r"ended with exit code 7|its exit code is not known",
    "is killed": r"was killed by SIGKILL|its exit code is not known",
}
"""How the user's code ends, and the error that says so. Ray does not tell the exit codes of its workers."""

ENDS = ["returns", "forks", *ERRORS, "returns"]

SOME_ENDS = ["forks", "exits", "is killed", "returns"]

PLACES = [
    *((place, library) for place in ("objective", "metric", "callback") for library in ("xgboost", "lightgbm")),
    *((place, "") for place in ("function", "trial", "partition")),
]

POOLS = {
    "without Ray": "local://code-without-ray?max_nodes=1&cpus_per_node=2&ray=false",
    "with Ray": "local://code-with-ray?max_nodes=1&cpus_per_node=2",
}

ESSENTIAL = [
    ("without Ray", "objective", "lightgbm", 2),
    ("without Ray", "function", "", 2),
    ("without Ray", "partition", "", 2),
    ("with Ray", "metric", "lightgbm", 2),
    ("with Ray", "callback", "xgboost", 2),
]
"""Cells that fail for most of the reasons for which any does. `make soak` tries all."""


def end(how: str, *, here: bool) -> None:
    """End the user's code in one place."""
    if not here:
        return
    if how == "raises":
        raise ValueError(SAID)
    if how == "exits":
        raise SystemExit(SAID)
    if how == "is interrupted":
        raise KeyboardInterrupt(SAID)
    if how == "ends its process":
        os._exit(7)
    if how == "is killed":
        if not os.fork():
            signal.pause()  # lives on with all that its parent had
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "forks" and (child := os.fork()):
        os.waitpid(child, 0)


def in_last_rank() -> bool:
    return gang_context().rank == gang_context().world_size - 1


def objective(how: str) -> Callable[..., Any]:
    def squared_error(predicted: np.ndarray, data: Any) -> tuple[np.ndarray, np.ndarray]:
        end(how, here=in_last_rank())
        return predicted - data.get_label(), np.ones_like(predicted)

    return squared_error


def metric(how: str, library: str) -> Callable[..., Any]:
    def mine(predicted: np.ndarray, data: Any) -> tuple[Any, ...]:
        end(how, here=in_last_rank())
        value = float(np.mean(np.abs(predicted - data.get_label())))
        return ("mine", value) if library == "xgboost" else ("mine", value, False)

    return mine


def callback(how: str, library: str) -> Any:
    """A callback that sets the learning rate of each round."""
    if library == "xgboost":
        import xgboost

        class Rate(xgboost.callback.TrainingCallback):
            def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                end(how, here=in_last_rank())
                model.set_param("eta", 0.1 * (epoch + 1))
                return False

        return Rate()

    def rate(env: Any) -> None:
        end(how, here=in_last_rank())
        env.model.reset_parameter({"learning_rate": 0.1 * (env.iteration + 1)})

    rate.before_iteration = True  # type: ignore[attr-defined]
    return rate


def code(place: str, how: str, library: str) -> dict[str, Any]:
    """The user's code, by the argument of an estimator."""
    return {
        "objective": lambda: {"objective": objective(how)},
        "metric": lambda: {"custom_metric": metric(how, library)},
        "callback": lambda: {"callbacks": [callback(how, library)]},
    }[place]()


def plain(place: str, library: str, frame: pd.DataFrame) -> tuple[np.ndarray, list[float]]:
    """Predictions, and values of the user's metric, of the plain library in this process."""
    given = code(place, "returns", library)
    results: dict[str, dict[str, list[float]]] = {}
    callbacks = given.get("callbacks", [])
    if library == "xgboost":
        import xgboost

        rows = xgboost.DMatrix(frame[["x"]], frame["y"])
        booster = xgboost.train(
            {"nthread": 1},
            rows,
            5,
            obj=given.get("objective"),
            custom_metric=given.get("custom_metric"),
            evals=[(rows, "rows")],
            evals_result=results,
            callbacks=callbacks,
            verbose_eval=False,
        )
        return booster.predict(rows), results.get("rows", {}).get("mine", [])
    import lightgbm

    data = lightgbm.Dataset(frame[["x"]], frame["y"], params={"verbosity": -1})
    params = {"verbosity": -1, "num_threads": 1, "objective": given.get("objective", "regression")}
    trained = lightgbm.train(
        params,
        data,
        5,
        valid_sets=[data],
        valid_names=["rows"],
        feval=given.get("custom_metric"),
        callbacks=[*callbacks, lightgbm.record_evaluation(results)],
    )
    return np.asarray(trained.predict(frame[["x"]])), results.get("rows", {}).get("mine", [])


class Call:
    """Calls of one place on one pool.

    Args:
        config: Options of the calls.
        place: Place of the user's code.
        library: Library of a training.
        workers: Number of workers.
        frame: Rows.
        folder: Folder for the rows.
    """

    def __init__(
        self, config: RunConfig, place: str, library: str, workers: int, frame: pd.DataFrame, folder: Path
    ) -> None:
        self.config, self.place, self.library, self.workers = config, place, library, workers
        self.frame = frame
        self.rows = DataConnector.from_parquet(folder)

    def check(self, how: str) -> None:
        """Call once, and check the value or the error."""
        if self.place in ("trial", "partition"):
            getattr(self, self.place)(how)
        elif how in ERRORS:
            with pytest.raises(ShoalError, match=ERRORS[how]) as raised:
                self.value(how)
            assert f"rank {self.workers - 1} " in str(raised.value)
        elif self.place == "function":
            assert self.value(how) == [rank * 10 for rank in range(self.workers)]
        else:
            predictions, values = self.value(how)
            expected = plain(self.place, self.library, self.frame)
            np.testing.assert_allclose(predictions, expected[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(values, expected[1], rtol=1e-5)

    def value(self, how: str) -> Any:
        if self.place == "function":

            @distributed(num_workers=self.workers, remote=True, run_config=self.config)
            def train(how: str) -> int:
                end(how, here=in_last_rank())
                return gang_context().rank * 10

            return train.distributed(how)
        given = code(self.place, how, self.library)
        if self.library == "xgboost":
            scaling = XGBScalingConfig(num_workers=self.workers, num_cpu_per_worker=1)
            estimator: Any = XGBEstimator(5, scaling_config=scaling, run_config=self.config, **given)
        else:
            scaling = LightGBMScalingConfig(num_workers=self.workers, num_cpu_per_worker=1)  # type: ignore[assignment]
            params = {"verbosity": -1}
            estimator = LightGBMEstimator(5, params=params, scaling_config=scaling, run_config=self.config, **given)  # type: ignore[arg-type]
        estimator.fit(self.rows, ["x"], "y", {"rows": self.rows})
        return estimator.predict(self.frame[["x"]]), estimator.get_eval_results().get("rows", {}).get("mine", [])

    def partition(self, how: str) -> None:
        """Only the partition whose function has failed fails."""

        def mean(rows: pd.DataFrame, key: int, how: str) -> float:
            end(how, here=key == 1)
            return float(rows["y"].mean())

        scaling = many.PartitionsScalingConfig(num_workers=self.workers)
        found = many.run(mean, self.rows, "key", kwargs={"how": how}, scaling_config=scaling, run_config=self.config)
        expected = self.frame.groupby("key")["y"].mean()
        failed = [1] if how in ERRORS else []
        assert {each.key: each.value for each in found if each.status == "succeeded"} == pytest.approx(
            expected.drop(failed).to_dict()
        )
        assert [each.key for each in found.failed] == failed
        for each in found.failed:
            assert re.search(ERRORS[how], each.error)

    def trial(self, how: str) -> None:
        """Only the trial whose function has failed fails."""

        def square(params: dict[str, float], context: Any) -> float:
            end(how, here=context.number == 1)
            return (params["x"] - 1) ** 2

        found = search(
            square, {"x": {"low": -5, "high": 5}}, trials=4, seed=1, parallel=self.workers, run_config=self.config
        )
        trials = found.trials.set_index("number")
        failed = [1] if how in ERRORS else []
        assert sorted(trials.index[trials["state"] != "complete"]) == failed
        for number in failed:
            assert re.search(ERRORS[how], trials["error"][number])
        ended = trials.drop(failed)
        assert ended["value"].to_numpy() == pytest.approx((ended["config/x"].to_numpy() - 1) ** 2)
        assert found.best_value == pytest.approx(ended["value"].min())


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Few different values, so that each number of workers finds the same bins."""
    random = np.random.default_rng(0)
    x = random.integers(0, 16, 2_000).astype(float)
    return pd.DataFrame({"x": x, "y": np.sin(x) + random.normal(0, 0.1, 2_000), "key": np.arange(2_000) % 3})


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str], str]]:
    """Function that returns the name of a pool with room for two workers, and starts it at the first call."""
    with new_home():
        with contextlib.ExitStack() as running:

            @functools.cache
            def started(kind: str) -> str:
                pool = ComputePool(POOLS[kind]).up()
                running.callback(pool.down)
                return pool.name

            yield started
        nothing_left()


def check(config: RunConfig, place: str, library: str, workers: int, ends: list[str], frame: pd.DataFrame) -> None:
    """Call with each end of the user's code, one call after the other."""
    with tempfile.TemporaryDirectory() as folder:
        frame.to_parquet(Path(folder, "rows.parquet"), row_group_size=500)
        call = Call(config, place, library, workers, frame, Path(folder))
        for how in ends:
            print(f"the user's code {how}")
            call.check(how)


def named(pool: str, place: str, library: str, workers: int) -> str:
    return f"{library} {place}, {workers} workers, {pool}".strip()


CELLS = [(pool, *place, workers) for pool in POOLS for place in PLACES for workers in (1, 2)]


@pytest.mark.parametrize(
    ("kind", "place", "library", "workers", "ends"),
    [
        *(pytest.param(*cell, SOME_ENDS, id=named(*cell)) for cell in ESSENTIAL),
        *(pytest.param(*cell, ENDS, id=f"{named(*cell)}, all ends", marks=pytest.mark.long) for cell in CELLS),
    ],
)
def test_the_users_code_ends_in_any_way_and_the_next_call_is_right(
    pools: Callable[[str], str],
    kind: str,
    place: str,
    library: str,
    workers: int,
    ends: list[str],
    frame: pd.DataFrame,
) -> None:
    config = RunConfig(pool_name=pools(kind), tracking=None, max_restarts=0)
    check(config, place, library, workers, ends, frame)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("place", "library"), PLACES)
def test_the_same_holds_for_the_embedded_pool(
    fresh_home: Path, place: str, library: str, workers: int, frame: pd.DataFrame
) -> None:
    check(RunConfig(tracking=None, max_restarts=0), place, library, workers, ENDS, frame)
    end_embedded_pools()
    nothing_left()
