"""A call that searches for parameters, in the process of its caller, and what it has found."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.jobs import shipped_code
from shoal.jobs.kind import KindCall
from shoal.jobs.results import JobResult, SearchSummary
from shoal.kinds.search.spec import SearchCode, TuneJobSpec
from shoal.lazy_imports import cloudpickle, optuna, pd
from shoal.training.boosting.params import UserCode
from shoal.training.locations import Claim
from shoal.training.pickling import pickled
from shoal.training.reporting import say


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
        from shoal.kinds.search.study_storage import ended_in

        rows = [
            {name: getattr(each, name) for name in ("number", "state", "value")}
            | {f"config/{name}": value for name, value in each.params.items()}
            | each.metrics
            | {name: getattr(each, name) for name in ("rounds", "seconds", "error")}
            for each in ended_in(self.study)
        ]
        return pd.DataFrame(rows)


class SearchCall(KindCall[TuneJobSpec, tuple[SearchCode, UserCode], SearchResult]):
    """A search; the code is its own, and the estimator's functions."""

    @property
    def tracks_like_caller(self) -> bool:  # type: ignore[override]
        """Whether only a caller that uses MLflow has a run: a function needs one for its own MLflow calls."""
        return self.spec.train is not None

    def check(self) -> None:
        """Find errors such as a misspelt column or folder before a pool is started.

        Raises:
            DataError: The footers of the Parquet files show that the data cannot be used.
            InvalidArgumentError: The folder for the model cannot be written, the search needs `direction`, or a
                callback of the estimator stops early.
        """
        from shoal.training.boosting.library import library_of
        from shoal.training.boosting.rows import checked_data

        spec = self.spec
        if spec.train is not None:
            checked_data(spec.trial_request())
            if any("EarlyStopping" in type(each).__name__ for each in self.code[1].callbacks):
                raise InvalidArgumentError(
                    "a callback of the estimator stops the trials early, but the winner is trained on all rows, "
                    "without an eval set: set early_stopping_rounds of the search, which trains the winner with the "
                    "rounds of the best trial"
                )
            if spec.metric is None:
                direction = spec.direction or spec.train.direction
                library_of(spec.train.framework).refuse_untold(self.code[1], direction)
        super().check()

    def stored(self) -> dict[str, Any]:
        """Store the code."""
        code, user_code = self.code
        return {
            "program": shipped_code.store(pickled(code, "the space, sampler or pruner of a search")) if code else None,
            "user_code": shipped_code.store_user_code(user_code) if user_code else None,
        }

    def read(self, result: JobResult, location: str | None) -> SearchResult:
        """Return what the job has found."""
        assert result.search is not None, "a search returns its best trial"
        summary, trains = result.search, self.spec.train is not None

        def load_model() -> Any:
            from shoal.jobs import load_training
            from shoal.jobs.files import artifacts

            return load_training(result, location).booster() if trains else artifacts.load_reported(result, location)

        def load_study() -> optuna.Study:
            from shoal.jobs.journal.attempts import Key
            from shoal.kinds.search.study_storage import copy_of
            from shoal.state import Store

            return copy_of(Store(), Key(result.job_id, result.attempt), summary.study)

        return SearchResult(summary, load_model, load_study, result)

    def run_here(self, env: Mapping[str, str], claim: Claim) -> SearchResult:
        """Search in the connected Ray cluster."""
        from shoal.kinds.search.engine import run
        from shoal.kinds.search.study_storage import STUDY
        from shoal.training.boosting.engine import train
        from shoal.training.gang.gang import end_gangs

        spec, (code, user_code) = self.spec, self.code
        if spec.register_as is not None:
            raise InvalidArgumentError(
                "register needs a job, but this process is connected to a Ray cluster, where calls do not run as jobs: "
                "remove register, or search from a process that is not connected"
            )
        study = optuna.storages.InMemoryStorage()
        location = spec.run_config.artifact_location or os.path.join(tempfile.gettempdir(), "shoal-search")
        folder = f"{location}/{os.urandom(8).hex()}"
        found = run(
            spec,
            code,
            user_code,
            storage=study,
            folder=folder,
            env=env,
            on_end=lambda trial: say(f"trial {trial.number} {trial.state}: {trial.value} with {trial.params}"),
        )
        best, model = found.best, None
        if spec.train is not None:
            end_gangs()
            winner = spec.winner(best.params, best.rounds)
            model = train(winner, user_code=user_code, env=env).booster()
        elif best.model is not None:
            model = cloudpickle.loads(Path(best.model).read_bytes())
        return SearchResult(found.summary(1), lambda: model, lambda: optuna.load_study(study_name=STUDY, storage=study))
