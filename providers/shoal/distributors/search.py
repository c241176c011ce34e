"""Provide `search`, which searches for the parameters of a model with Optuna, as one job whose workers run trials."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from shoal.distributors.call import Call, run_call, submitting
from shoal.distributors.estimator import BoostingEstimator, connector_of
from shoal.errors import InvalidArgumentError, MissingExtraError
from shoal.jobs.register import Register
from shoal.jobs.spec import NOT_STORED
from shoal.kinds.search.call import SearchCall, SearchResult
from shoal.kinds.search.spec import SearchCode, TuneJobSpec
from shoal.training.boosting.params import UserCode
from shoal.training.demand import ScalingConfig
from shoal.training.pickling import code_digest, pickled
from shoal.training.run_config import RunConfig

Searched = Any
"""Type of what is searched: an estimator, or a function ``(params, context)``."""

Space = Any
"""Type of a space: a mapping from names to distributions of Optuna, lists of choices or options of `Range`; or a
function of the trial."""


def search(
    estimator_or_function: Searched,
    space: Space,
    dataset: Any = None,
    *,
    input_cols: Sequence[str] | None = None,
    label_col: str | None = None,
    holdout: Any = None,
    trials: int = 40,
    parallel: int = -1,
    cpus_per_trial: int = -1,
    use_gpu: bool | None = None,
    sampler: Any = None,
    pruner: Any = None,
    metric: str | None = None,
    direction: str | None = None,
    seed: int = 0,
    batches: bool = False,
    early_stopping_rounds: int | None = None,
    report_every: int | None = None,
    register: Register | Mapping[str, Any] | None = None,
    run_config: RunConfig | None = None,
    **fit_options: Any,
) -> SearchResult:
    """Search for the parameters of a model with Optuna, and train the winner on all rows of the dataset.

    The search is one job. Its workers run the trials, one at a time each, and each worker trains alone, with all rows,
    which it reads and quantises once. If the job's driver is lost, the next attempt of the job goes on: no trial that
    has ended is repeated, and with one worker the further suggestions are those of a search that was never interrupted.
    The suggestions of several workers depend on which trial ends first; with ``batches=True`` they do not.

    Args:
        estimator_or_function: An `XGBEstimator` or `LightGBMEstimator` with the parameters that stay the same; or a
            function ``(params, context)`` that returns the value of a trial, or reports values with
            ``context.report(value)``. `context` is a `TrialContext`.
        space: Values among which the search chooses, by the name of the parameter: distributions of Optuna, lists of
            choices, or dicts such as ``{"low": 0.01, "high": 0.3, "log": True}`` and ``{"type": "int", "low": 2,
            "high": 9}``. ``n_estimators`` is the number of boosting rounds. Or a function that gets the trial of Optuna
            and returns the parameters.
        dataset: Rows to train on, as in `fit`. For a function: a dataset or a mapping from names to datasets, which
            ``context.dataset_map`` contains; a single dataset has the name "train".
        input_cols: Names of the feature columns, for an estimator.
        label_col: Name of the label column, for an estimator.
        holdout: Rows on which the trials are compared. Default: a fifth of the rows of the dataset, on which no trial
            trains. For a function, the dataset "holdout" of ``context.dataset_map``.
        trials: Number of trials.
        parallel: Number of workers. -1: one per active node.
        cpus_per_trial: CPUs and threads of each worker. -1: the CPUs of a node divided by its number of workers.
        use_gpu: Whether each worker has a GPU. Default: as the estimator decides; for a function, no GPU.
        sampler: ``"tpe"`` (default), ``"random"``, ``"gp"``, ``"cmaes"``, ``"qmc"``, ``"grid"``, or a sampler of
            Optuna. Each trial gets a copy of it, seeded with `seed` and the trial's number.
        pruner: ``"median"`` (default), ``"halving"``, ``"hyperband"``, ``"none"``, or a pruner of Optuna. It ends
            trials early by their metric on the holdout so far.
        metric: Deciding metric. Default: the last metric of the holdout; for a function, its only or last one.
        direction: ``"minimize"`` or ``"maximize"``. Default: as the library's metric demands; ``"minimize"`` for a
            function.
        seed: Seed of the suggestions, and of the division if there is no holdout.
        batches: Whether the trials run in batches of `parallel` trials, so that the suggestions of several workers are
            the same in each run. Workers then wait for the slowest trial of a batch.
        early_stopping_rounds: Number of rounds without an improvement on the holdout after which a trial stops. The
            winner is trained with the best number of rounds.
        report_every: Number of rounds between two values by which a trial may end early. Default: so many that a trial
            reports at most 100 values.
        register: Options to register the winner in MLflow, and to promote it.
        run_config: Pool and limits of the run. Default: those of the estimator.
        fit_options: Further arguments of the estimator's `fit`, such as `weight_col`.

    Returns:
        The best parameters, their model, the study, and the trials.

    Raises:
        InvalidArgumentError: An argument is not legal.
        DataError: The data cannot be used.
        MissingExtraError: Optuna is not installed.
        JobFailedError: The job failed. If all trials have failed, the message contains the first error.

    Example:
        >>> from shoal.distributors.xgboost import XGBEstimator
        >>> from shoal.tune import search
        >>> space = {"max_depth": {"type": "int", "low": 2, "high": 9}, "eta": {"low": 0.01, "high": 0.3, "log": True}}
        >>> found = search(XGBEstimator(), space, flights, input_cols=["distance"], label_col="arr_delay", trials=20)
        >>> found.best_params
        {'max_depth': 5, 'eta': 0.11}
    """
    return run_call(partial(_call, **locals()))  # the call's arguments, as no other name exists yet


def _call(
    staged: ExitStack,
    estimator_or_function: Searched,
    space: Space,
    dataset: Any,
    input_cols: Sequence[str] | None,
    label_col: str | None,
    holdout: Any,
    parallel: int,
    cpus_per_trial: int,
    use_gpu: bool | None,
    sampler: Any,
    pruner: Any,
    register: Any,
    run_config: RunConfig | None,
    fit_options: Mapping[str, Any],
    **options: Any,
) -> Call[SearchResult]:
    """Return the `Call` object of a search, from its spec and its code."""
    if importlib.util.find_spec("optuna") is None:
        raise MissingExtraError("optuna", "tune")
    searched = estimator_or_function
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    user_code, function = UserCode(), None
    if isinstance(searched, BoostingEstimator):
        user_code = searched.user_code
        run_config = run_config or searched.run_config
        use_gpu = searched.scaling_config.use_gpu if use_gpu is None else use_gpu
        given["train"] = {
            "framework": searched.framework,
            "n_estimators": searched.n_estimators,
            "params": searched.params,
            "scaling_config": searched.scaling_config,
            "dataset": connector_of("dataset", dataset, staged).to_spec(),
            "input_cols": input_cols,
            **({} if label_col is None else {"label_col": label_col}),
            **fit_options,
        }
        if holdout is not None:
            given["holdout"] = connector_of("holdout", holdout, staged).to_spec()
    else:
        _check_function(searched, {"input_cols": input_cols, "label_col": label_col, **fit_options})
        function = pickled(searched, "the function of a search")
        given["dataset_map"] = _datasets(dataset, holdout, staged)
    suggest = space if callable(space) else None
    if suggest is None:
        given["space"] = space
    code = SearchCode(function, suggest, _object("sampler", sampler, given), _object("pruner", pruner, given))
    if code or user_code:
        # The code is stored when the job is submitted.
        given |= {"program": NOT_STORED if code else None, "user_code": NOT_STORED if user_code else None}
        parts = (searched if function is not None else None, code.space, code.sampler, code.pruner, user_code)
        given["code_digest"] = code_digest(parts)
    spec = TuneJobSpec(
        **given,
        register=register,
        run_config=run_config or RunConfig(),
        scaling_config=ScalingConfig(num_workers=parallel, num_cpu_per_worker=cpus_per_trial, use_gpu=use_gpu),
    )
    return Call(SearchCall(spec, (code, user_code)))


submit_search = submitting(search, _call)


def _check_function(function: Any, options: Mapping[str, Any]) -> None:
    if not callable(function) or isinstance(function, type):
        raise InvalidArgumentError(
            f"search needs an XGBEstimator, a LightGBMEstimator or a function (params, context), not {function!r}"
        )
    if unknown := [name for name, value in options.items() if value is not None]:
        raise InvalidArgumentError(f"{', '.join(unknown)}: such options of fit are only for an estimator: remove them")


def _datasets(dataset: Any, holdout: Any, staged: ExitStack) -> dict[str, Any]:
    named = dict(dataset) if isinstance(dataset, Mapping) else {} if dataset is None else {"train": dataset}
    if holdout is not None:
        named["holdout"] = holdout
    return {name: connector_of(f'dataset "{name}"', each, staged).to_spec() for name, each in named.items()}


def _object(option: str, value: Any, given: dict[str, Any]) -> Any:
    """Return a sampler or pruner that is an object; put a name into the fields of the spec."""
    if value is None or isinstance(value, str):
        if value is not None:
            given[option] = value
        return None
    import optuna

    base = optuna.samplers.BaseSampler if option == "sampler" else optuna.pruners.BasePruner
    if not isinstance(value, base):
        raise InvalidArgumentError(f"{option} must be a name or an object of optuna.{option}s, not {value!r}")
    return value
