"""A call that trains a boosting model, in the process of its caller."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.jobs import shipped_code
from shoal.jobs.kind import KindCall
from shoal.kinds.training.spec import JobSpec
from shoal.training.boosting.params import UserCode

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult
    from shoal.training.boosting.request import TrainResult
    from shoal.training.locations import Claim


class TrainingCall(KindCall[JobSpec, UserCode, "TrainResult"]):
    """A training; the code are the user's functions."""

    returns_model = True
    tracks_like_caller = True

    def check(self) -> None:
        """Find errors such as a misspelt column or folder before a pool is started. The job repeats the checks.

        Raises:
            DataError: The footers of the Parquet files show that the data cannot be used.
            InvalidArgumentError: The folder for the model cannot be written, or early stopping needs `direction`.
        """
        from shoal.training.boosting.library import library_of
        from shoal.training.boosting.rows import checked_data

        spec = self.spec
        train, _ = checked_data(spec)
        if spec.early_stopping_rounds is not None:
            library_of(spec.framework).refuse_untold(self.code, spec.direction)
        if spec.init_model is not None and importlib.util.find_spec(spec.framework):
            library_of(spec.framework).init_model(shipped_code.read(spec.init_model)).check(spec, train.source)
        super().check()

    def stored(self) -> dict[str, Any]:
        """Store the user's functions."""
        return {"user_code": shipped_code.store_user_code(self.code) if self.code else None}

    def read(self, result: JobResult, location: str | None) -> TrainResult:
        """Load the model and its metrics."""
        from shoal.jobs import load_training

        return load_training(result, location)

    def value(self, answer: TrainResult) -> Any:
        """Return the booster."""
        return answer.booster()

    def run_here(self, env: Mapping[str, str], claim: Claim) -> TrainResult:
        """Train in the connected Ray cluster."""
        from shoal.training.boosting.engine import train

        spec = self.spec
        content = None if spec.init_model is None else shipped_code.read(spec.init_model)
        return train(spec, user_code=self.code, init_model=content, env=env)
