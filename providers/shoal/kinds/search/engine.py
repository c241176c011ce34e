"""Run the trials of a search in one gang of workers, on the cluster that this process is connected to."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.errors import InvalidArgumentError, WorkerLostError
from shoal.jobs.results import SearchSummary
from shoal.kinds.search.ask_and_tell import Check, Search, Suggest, grid, pruner_named, sampler_named
from shoal.kinds.search.spec import SearchCode, TuneJobSpec
from shoal.kinds.search.study_storage import STUDY, Ended, direction_of, require_optuna
from shoal.lazy_imports import optuna
from shoal.training import cluster, trial_worker
from shoal.training.boosting.engine import KeepChoice, installed_library, with_gpu_choice
from shoal.training.boosting.library import library_of
from shoal.training.boosting.params import Direction, UserCode, agreed, custom_text
from shoal.training.boosting.trials import TrialPlan, decides_metric
from shoal.training.gang.gang import Gang, shared_gang
from shoal.training.gang.placement import GangShape
from shoal.training.pickling import pickled
from shoal.training.pytorch.program import imported
from shoal.training.reporting import OnProgress, Progress, ProgressDisplay
from shoal.training.run_config import Restarts
from shoal.training.trial_worker import BoostingRunner, FunctionRunner, Work

_MOST_REPORTS = 100
"""Largest number of values that a boosting trial reports by default, to bound the study."""

_DRAWN_SAMPLES = 3
"""Number of trials that are drawn from a function of the user. The library may refuse some of them."""


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Args:
        best: The best trial.
        ended: All trials.
        metric: Name of the deciding metric; None: the last one of a function.
        direction: minimize or maximize.
        num_workers: Number of workers.
        restarts: Number of restarts after a lost worker.
        seconds: Seconds of the trials.
    """

    best: Ended
    ended: tuple[Ended, ...]
    metric: str | None
    direction: Direction
    num_workers: int
    restarts: int
    seconds: float

    def summary(self, study: int) -> SearchSummary:
        """Return the best trial and the numbers of trials, for the result of the job.

        Args:
            study: Number of the attempt that has begun the study.
        """
        best = self.best
        assert best.value is not None
        return SearchSummary(
            best_params=best.params,
            best_value=best.value,
            best_trial=best.number,
            metric=self.metric,
            direction=self.direction,
            trials=dict(Counter(each.state for each in self.ended)),
            study=study,
        )


def run(
    spec: TuneJobSpec,
    code: SearchCode,
    user_code: UserCode,
    *,
    storage: optuna.storages.BaseStorage | None = None,
    flush: Callable[[], None] = lambda: None,
    folder: str = "",
    env: Mapping[str, str] | None = None,
    on_end: Callable[[Ended], None] = lambda ended: None,
    on_progress: OnProgress | None = None,
    keep_gpu_choice: KeepChoice = bool,
) -> Found:
    """Run the trials of a search that have not ended yet, and return the best trial.

    Args:
        spec: Spec of the search.
        code: Code of the search.
        user_code: Functions of the boosting training.
        storage: Storage of the study; None: in memory.
        flush: Function that writes what the storage has not written yet.
        folder: Folder or URI for the models that a function reports.
        env: Environment variables of the workers.
        on_end: Function that is called with each trial that has ended.
        on_progress: Function that takes the progress.
        keep_gpu_choice: Function that stores whether the job uses GPUs.

    Raises:
        InvalidArgumentError: An option or a parameter is not legal.
        DataError: The datasets cannot be used.
        CapacityError: The active nodes are too small for the workers, or had no free room in time.
        TrainingError: No trial has a value; the message contains the first error.
        WorkerLostError: Workers or nodes were lost more often than `max_restarts` allows.
        MissingExtraError: Optuna or the boosting library is not installed.
    """
    restarts = Restarts(spec.run_config)
    require_optuna()
    cluster.require_connection()
    pruner = code.pruner or pruner_named(spec.pruner)
    plan = _boosting_plan(spec, code, user_code, keep_gpu_choice) if spec.train is not None else None
    work, size, preloaded = _work(spec, code, plan, folder, pruner)

    @contextlib.contextmanager
    def workers() -> Iterator[Gang]:
        with shared_gang(size, timeout=restarts.wait_s, env=env) as gang:
            gang.preload(preloaded, complete=spec.train is None or bool(user_code))
            yield gang

    direction: Direction | None = None
    if storage is not None and STUDY in {each.study_name for each in storage.get_all_studies()}:
        direction = direction_of(optuna.load_study(study_name=STUDY, storage=storage))  # this search continues
    if direction is None and plan is not None:
        direction = _told_direction(plan, workers, restarts, size) if plan.is_told else plan.direction
    direction = direction or spec.direction or "minimize"
    metric = spec.metric if plan is None else plan.compared_by
    count = itertools.count(1)

    def ended(trial: Ended) -> None:
        on_end(trial)
        values = {} if trial.value is None else {metric or "value": trial.value}
        display.show(Progress(next(count), spec.trials, "trials", values))

    def attempt() -> None:
        with workers() as gang:
            try:
                gang.run(
                    trial_worker.serve,
                    [(work,)] * size.num_workers,
                    timeout=restarts.timeout,
                    report_uneven=False,
                    on_question=search.on_question,
                    on_lost=search.worker_lost,
                )
            except WorkerLostError:
                search.workers_lost()
                raise

    check: Check = plan.checked if plan else lambda params: None
    # The lines of the trials show the progress outside a terminal.
    with ProgressDisplay(first_line_s=math.inf, on_progress=on_progress) as display:
        search = _search(spec, code, storage, pruner, direction, size, check, flush, ended)
        if not search.is_over:
            restarts.run(attempt, checkpoint=lambda: f"trial {len(search.ended)} of {search.trials}")
    seconds = restarts.seconds
    return Found(search.best(), tuple(search.ended), metric, direction, size.num_workers, restarts.count, seconds)


def _told_direction(
    plan: TrialPlan,
    workers: Callable[[], contextlib.AbstractContextManager[Gang]],
    restarts: Restarts,
    size: GangShape,
) -> Direction:
    """Have a worker call the user's function, which tells the direction of the deciding metric."""

    def ask() -> Direction | None:
        with workers() as gang:
            tasks = [(plan.trials, plan.sample())] * size.num_workers
            answers: list[Direction | None]
            answers = gang.run(trial_worker.direction, tasks, timeout=restarts.timeout, report_uneven=False)
            return answers[0]

    told = restarts.run(ask, checkpoint=lambda: "the start")
    return agreed(custom_text(plan.user_code), told, plan.direction)


def _search(
    spec: TuneJobSpec,
    code: SearchCode,
    storage: optuna.storages.BaseStorage | None,
    pruner: optuna.pruners.BasePruner,
    direction: Direction,
    size: GangShape,
    check: Check,
    flush: Callable[[], None],
    on_end: Callable[[Ended], None],
) -> Search:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=storage,
        study_name=STUDY,
        sampler=code.sampler or sampler_named(spec.sampler),
        pruner=pruner,
        direction=direction,
        load_if_exists=True,
    )
    return Search(
        study,
        _suggest(spec, code),
        check,
        spec.trials,
        spec.seed,
        size.num_workers if spec.batches else None,
        grid(spec.space) if spec.sampler == "grid" else (),
        flush,
        on_end,
    )


def _suggest(spec: TuneJobSpec, code: SearchCode) -> Suggest:
    """Return the function that suggests the parameters of a trial."""
    space = code.space
    if space is None:
        return lambda trial: {name: values.suggest(trial, name) for name, values in spec.space.items()}

    def suggested(trial: optuna.Trial) -> Mapping[str, Any]:
        given = space(trial)
        if given is not None and not isinstance(given, Mapping):
            raise InvalidArgumentError(
                f"the function in space returned {given!r}: it must return a mapping from names of parameters to "
                "values, or None for the suggested ones"
            )
        return trial.params if given is None else given

    return suggested


def _work(
    spec: TuneJobSpec, code: SearchCode, plan: TrialPlan | None, folder: str, pruner: optuna.pruners.BasePruner
) -> tuple[Work, GangShape, list[str]]:
    """Return what the workers do, their number and size, and the modules they need."""
    if plan is None:
        size = spec.demand().resolved()
        function = code.function
        if function is None:
            assert spec.train_func is not None
            function = pickled(imported(spec.train_func), "the function of a search")
        return partial(FunctionRunner, function, spec.dataset_map, spec.metric, folder), size, []
    assert spec.train is not None
    every = spec.report_every or -(-spec.train.n_estimators // _MOST_REPORTS)
    report_every = 0 if type(pruner).__name__ == "NopPruner" else every
    return partial(BoostingRunner, plan.trials, report_every), plan.size, [library_of(spec.train.framework).worker]


def _boosting_plan(spec: TuneJobSpec, code: SearchCode, user_code: UserCode, keep_gpu_choice: KeepChoice) -> TrialPlan:
    assert spec.train is not None
    library = installed_library(spec.train.framework)
    request = spec.trial_request()
    scaled = with_gpu_choice(
        request.model_copy(update={"scaling_config": spec.scaling_config}), library, keep_gpu_choice
    )
    size = scaled.demand().resolved(clamp=spec.run_config.clamp)
    return TrialPlan(request, size, user_code, spec.metric, spec.direction, _samples(spec, code, request.framework))


def _samples(spec: TuneJobSpec, code: SearchCode, framework: str) -> list[Mapping[str, Any]]:
    """Return parameters of some trials: the ends of the space, and what may change their metric."""
    if code.space is not None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(spec.seed))
        with contextlib.suppress(Exception, SystemExit):  # code of the user; the trials show the error
            return [dict(_suggest(spec, code)(study.ask())) for _ in range(_DRAWN_SAMPLES)]
        return []
    first, last = ({name: each.ends()[place] for name, each in spec.space.items()} for place in (0, -1))
    others = [
        {**first, name: choice}
        for name, each in spec.space.items()
        if each.choices and decides_metric(framework, name)
        for choice in each.choices
    ]
    return [first, last, *others]
