"""Names of `snowflake.ml.modeling.tune`: a search over a function without arguments, as one job on a pool.

Sources: https://docs.snowflake.com/en/developer-guide/snowflake-ml/container-hpo and
https://docs.snowflake.com/en/developer-guide/snowpark-ml/reference/latest/container-runtime/tune.tuner
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from shoal.data import DataConnector
from shoal.distributors.search import search as run_search
from shoal.errors import InvalidArgumentError
from shoal.kinds.search.call import SearchResult
from shoal.kinds.search.spec import Range
from shoal.lazy_imports import pd
from shoal.training.trial_worker import TrialContext, current_trial

_MODES = {"min": "minimize", "max": "maximize"}


@dataclass(frozen=True)
class Uniform:
    """Float between `lower` and `upper`, each equally probable."""

    lower: float
    upper: float


class LogUniform(Uniform):
    """Float between `lower` and `upper`, whose logarithm is uniform."""


@dataclass(frozen=True)
class RandInt:
    """Integer from `lower` to below `upper`."""

    lower: int
    upper: int


@dataclass(frozen=True)
class Choice:
    """One of the options."""

    options: Sequence[Any]


uniform, loguniform, randint, choice = Uniform, LogUniform, RandInt, Choice


class SearchAlgorithm:
    """Base class of the search algorithms."""


@dataclass(frozen=True)
class RandomSearch(SearchAlgorithm):
    """Parameters at random.

    Args:
        random_state: Seed; None: another one in each run.
    """

    random_state: int | None = None


@dataclass(frozen=True)
class GridSearch(SearchAlgorithm):
    """Each combination of the lists in the search space, once; `num_trials` does not count."""


@dataclass(frozen=True)
class BayesOpt(SearchAlgorithm):
    """Bayesian search, for numbers only; here by Optuna's TPE sampler. Integers arrive as floats, as in Snowflake.

    Args:
        utility_kwargs: Accepted and not used: TPE has no utility function.
        random_state: Seed; None: another one in each run.
    """

    utility_kwargs: Mapping[str, Any] | None = None
    random_state: int | None = None


search = SimpleNamespace(
    SearchAlgorithm=SearchAlgorithm, RandomSearch=RandomSearch, GridSearch=GridSearch, BayesOpt=BayesOpt
)
"""The names of ``snowflake.ml.modeling.tune.search``, and of ``entities.search_algorithm``."""


@dataclass(frozen=True)
class TunerConfig:
    """Options of a `Tuner`.

    Args:
        metric: Name of the metric that decides, which the function reports.
        mode: ``"min"`` or ``"max"``.
        search_alg: How parameters are chosen; random by default.
        num_trials: Number of trials.
        max_concurrent_trials: Number of trials at a time. None: one per node.
        resource_per_trial: CPUs and GPUs of each trial, such as ``{"CPU": 2, "GPU": 1}``. None: the CPUs of a node
            divided by its trials.

    Raises:
        InvalidArgumentError: A value is not legal.
    """

    metric: str
    mode: str
    search_alg: SearchAlgorithm = field(default_factory=RandomSearch)
    num_trials: int = 5
    max_concurrent_trials: int | None = None
    resource_per_trial: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise InvalidArgumentError(f'mode must be "min" or "max", not {self.mode!r}')
        if not isinstance(self.search_alg, SearchAlgorithm):
            raise InvalidArgumentError(
                f"search_alg must be RandomSearch(), GridSearch() or BayesOpt(), not {self.search_alg!r}"
            )
        for name, value in (self.resource_per_trial or {}).items():
            if name.lower() not in ("cpu", "gpu") or value < 0:
                raise InvalidArgumentError(
                    f'resource_per_trial contains {name!r}: {value!r}, but only "CPU" and "GPU" with numbers are '
                    "allowed"
                )


class TunerContext:
    """What the function of a `Tuner` gets from `get_tuner_context`.

    Args:
        trial: The trial that this process runs.
    """

    def __init__(self, trial: TrialContext) -> None:
        self._trial = trial

    def get_hyper_params(self) -> dict[str, Any]:
        """Return the parameters of the trial."""
        return dict(self._trial.params)

    def get_dataset_map(self) -> dict[str, DataConnector]:
        """Return the datasets, by name."""
        return dict(self._trial.dataset_map)

    def report(self, metrics: Mapping[str, float], model: Any = None) -> None:
        """Report the metrics of the trial, and its model, which is pickled."""
        self._trial.report(metrics, model=model)


def get_tuner_context() -> TunerContext:
    """Return the context of the trial that this process runs.

    Raises:
        InvalidArgumentError: This process runs no trial.
    """
    return TunerContext(current_trial())


class TunerResults:
    """Results of a `Tuner`.

    Args:
        found: What the search has found.

    Attributes:
        found: The same as `shoal.tune.search` returns it, with Optuna's study.
    """

    def __init__(self, found: SearchResult, fixed: Mapping[str, Any]) -> None:
        self.found = found
        self._fixed = dict(fixed)

    @functools.cached_property
    def results(self) -> pd.DataFrame:
        """One row per trial: metrics, ``trial_id``, ``time_total_s`` and ``config/NAME`` per parameter."""
        trials = self.found.trials.drop(columns=["value", "rounds"])
        for name, value in self._fixed.items():
            trials[f"config/{name}"] = [value] * len(trials)
        config = [name for name in trials.columns if name.startswith("config/")]
        named = trials.rename(columns={"number": "trial_id", "seconds": "time_total_s"})
        others = [name for name in named.columns if name not in (*config, "trial_id", "time_total_s", "state", "error")]
        return named[[*others, "trial_id", "time_total_s", *config, "state", "error"]]

    @property
    def best_result(self) -> pd.DataFrame:
        """The row of the best trial, as a frame."""
        rows = self.results
        return rows[rows["trial_id"] == self.found.best_trial].reset_index(drop=True)

    @property
    def best_model(self) -> Any:
        """The model that the best trial has reported; None if it has reported none."""
        return self.found.model


class Tuner:
    """Search for the parameters of a function, as Snowflake's `Tuner`.

    Args:
        train_func: Function without arguments, which calls `get_tuner_context`. It runs once per trial.
        search_space: Values by the name of the parameter: `uniform`, `loguniform`, `randint`, `choice`, a list of
            choices, or a single value that stays the same.
        tuner_config: Options of the search.

    Raises:
        InvalidArgumentError: The search space is not possible with the search algorithm.
    """

    def __init__(
        self, train_func: Callable[[], Any], search_space: Mapping[str, Any], tuner_config: TunerConfig
    ) -> None:
        self._function = train_func
        self._config = tuner_config
        self._space: dict[str, Range] = {}
        self._fixed: dict[str, Any] = {}
        for name, value in search_space.items():
            if isinstance(value, Uniform):
                self._space[name] = Range(low=value.lower, high=value.upper, log=isinstance(value, LogUniform))
            elif isinstance(value, RandInt):
                self._space[name] = Range(type="int", low=value.lower, high=value.upper - 1)
            elif isinstance(value, Choice | list | tuple):
                choices = value.options if isinstance(value, Choice) else value
                self._space[name] = Range(type="categorical", choices=tuple(choices))
            else:
                self._fixed[name] = value
                continue
            is_list = self._space[name].type == "categorical"
            if isinstance(tuner_config.search_alg, BayesOpt) and is_list:
                raise InvalidArgumentError(
                    f'BayesOpt needs numbers, but the search space has choices for "{name}": use uniform or randint, '
                    "or RandomSearch"
                )
            if isinstance(tuner_config.search_alg, GridSearch) and not is_list:
                raise InvalidArgumentError(
                    f'GridSearch needs lists of values, but the search space has {value!r} for "{name}": give a list, '
                    "or use RandomSearch"
                )

    def run(self, dataset_map: Mapping[str, DataConnector] | None = None) -> TunerResults:
        """Run the trials as a job, on the pool that a call of an estimator would use, and return their results.

        Args:
            dataset_map: Datasets by name, for `TunerContext.get_dataset_map`.

        Raises:
            JobFailedError: The job failed; the message ends with the cause.
        """
        config, algorithm = self._config, self._config.search_alg
        resources = {name.lower(): value for name, value in (config.resource_per_trial or {}).items()}
        is_grid = isinstance(algorithm, GridSearch)
        seed = getattr(algorithm, "random_state", None)
        found = run_search(
            _Trial(self._function, self._fixed, as_floats=isinstance(algorithm, BayesOpt)),
            self._space,
            dict(dataset_map or {}),
            trials=math.prod(len(values.grid()) for values in self._space.values()) if is_grid else config.num_trials,
            parallel=config.max_concurrent_trials or -1,
            cpus_per_trial=max(1, int(resources["cpu"])) if "cpu" in resources else -1,
            use_gpu=resources.get("gpu", 0) > 0 or None,
            sampler="grid" if is_grid else "tpe" if isinstance(algorithm, BayesOpt) else "random",
            pruner="none",
            metric=config.metric,
            direction=_MODES[config.mode],
            seed=secrets.randbelow(2**31) if seed is None else seed,
        )
        return TunerResults(found, self._fixed)


@dataclass(frozen=True)
class _Trial:
    """The function of a search that calls a function without arguments.

    Args:
        function: The user's function.
        fixed: Parameters that stay the same.
        as_floats: Whether integers become floats.
    """

    function: Callable[[], Any]
    fixed: dict[str, Any]
    as_floats: bool

    def __call__(self, params: dict[str, Any], context: TrialContext) -> None:
        chosen = {name: float(value) for name, value in params.items()} if self.as_floats else params
        context.params = {**self.fixed, **chosen}
        self.function()
