"""What a search for parameters has found, as the job of the search or the connected Ray cluster returns it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.jobs.results import JobResult, SearchSummary
from shoal.jobs.specs.tuning import TuneJobSpec
from shoal.jobs.tuning.code import SearchCode
from shoal.training.boosting.user_code import UserCode

if TYPE_CHECKING:
    import optuna
    import pandas as pd


class SearchResult:
    """What a search has found.

    Args:
        summary: The best trial, and the numbers of trials.
        load_model: Function that loads the model.
        load_study: Function that loads the study.

    Attributes:
        best_params: Parameters of the best trial.
        best_value: Value of the deciding metric in the best trial.
        best_trial: Number of the best trial, from 0.
        job_result: Result of the job; None if the search ran in the connected Ray cluster.
    """

    def __init__(
        self,
        summary: SearchSummary,
        load_model: Callable[[], Any],
        load_study: Callable[[], optuna.Study],
        job_result: JobResult | None = None,
    ) -> None:
        self.best_params: dict[str, Any] = dict(summary.best_params)
        self.best_value = summary.best_value
        self.best_trial = summary.best_trial
        self.job_result = job_result
        self._summary = summary
        self._load_model = load_model
        self._load_study = load_study

    def __repr__(self) -> str:
        return f"SearchResult(best_value={self.best_value!r}, best_params={self.best_params!r})"

    @functools.cached_property
    def model(self) -> Any:
        """The model of the best parameters: the booster that was trained on all rows of the dataset, or what the best
        trial of a function has reported (None if nothing)."""
        return self._load_model()

    @functools.cached_property
    def study(self) -> optuna.Study:
        """The study, as a copy in memory, for Optuna's plots and importances.

        Trials that were repeated after their driver or worker was lost are failed trials with the attribute
        ``shoal:repeated``.
        """
        return self._load_study()

    @functools.cached_property
    def trials(self) -> pd.DataFrame:
        """One row per trial: number, state, value, ``config/NAME`` per parameter, metrics, seconds and error."""
        import pandas as pd

        from shoal.jobs.tuning.trials import ended_in

        rows = [
            {
                "number": each.number,
                "state": each.state,
                "value": each.value,
                **{f"config/{name}": value for name, value in each.params.items()},
                **each.metrics,
                "rounds": each.rounds,
                "seconds": each.seconds,
                "error": each.error,
            }
            for each in ended_in(self.study)
        ]
        return pd.DataFrame(rows)


@dataclass(frozen=True)
class Prepared:
    """Arguments of a search as a spec, and its code, which is stored when the job is submitted.

    Args:
        spec: Spec of the search.
        code: Code of the search.
        user_code: The estimator's functions.
    """

    spec: TuneJobSpec
    code: SearchCode
    user_code: UserCode


def here(prepared: Prepared, env: Mapping[str, str]) -> SearchResult:
    """Run a search in the Ray cluster that this process is connected to."""
    import tempfile
    from collections import Counter
    from pathlib import Path

    import cloudpickle
    import optuna

    from shoal.jobs.tuning.engine import run
    from shoal.jobs.tuning.study_storage import STUDY
    from shoal.training.boosting.engine import train
    from shoal.training.gang.gang import end_gangs

    if prepared.spec.register_as is not None:
        raise InvalidArgumentError(
            "register needs a job, but this process is connected to a Ray cluster, where calls do not run as jobs: "
            "remove register, or search from a process that is not connected"
        )
    spec = prepared.spec
    storage = optuna.storages.InMemoryStorage()
    location = spec.run_config.artifact_location or os.path.join(tempfile.gettempdir(), "shoal-search")
    folder = f"{location}/{os.urandom(8).hex()}"
    found = run(spec, prepared.code, prepared.user_code, storage=storage, folder=folder, env=env, on_end=_print_trial)
    best = found.best
    assert best.value is not None
    states = dict(Counter(each.state for each in found.ended))
    summary = SearchSummary(
        best_params=best.params, best_value=best.value, best_trial=best.number, metric=found.metric,
        direction=found.direction, trials=states, study=1,
    )  # fmt: skip
    model: Any = None
    if spec.train is not None:
        end_gangs()
        winner = spec.winner(best.params, best.rounds if spec.early_stopping_rounds else None)
        model = train(winner, user_code=prepared.user_code, env=env).booster()
    elif best.model is not None:
        model = cloudpickle.loads(Path(best.model).read_bytes())
    return SearchResult(summary, lambda: model, lambda: optuna.load_study(study_name=STUDY, storage=storage))


def _print_trial(trial: Any) -> None:
    from shoal.training.reporting import say

    say(f"trial {trial.number} {trial.state}: {trial.value} with {trial.params}")


def of_job(result: JobResult, *, location: str | None, trains: bool) -> SearchResult:
    """Return what the job of a search has found."""
    assert result.search is not None, "a search returns its best trial"
    summary = result.search

    def load_model() -> Any:
        from shoal.jobs import load_training
        from shoal.jobs.files import artifacts

        return load_training(result, location).booster() if trains else artifacts.load_reported(result, location)

    def load_study() -> optuna.Study:
        from shoal.jobs.journal.attempts import Key
        from shoal.jobs.tuning.study_storage import copy_of
        from shoal.state import Store

        return copy_of(Store(), Key(result.job_id, result.attempt), summary.study)

    return SearchResult(summary, load_model, load_study, result)
