"""Record in MLflow by which rules, and on which holdout, a version that waits for a decision is compared with the
champion later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs.mlflow.job_run import Run
from shoal.jobs.mlflow.registry import REASON_TAG, is_unreachable
from shoal.jobs.results import WAITING
from shoal.jobs.specs.register import Register
from shoal.secrets.redaction import redact_all

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

TAG = "shoal.waiting_version"
"""Name of the tag that contains the URI of the record of a registered version that waits, or has waited."""

_FOLDER = "shoal/waiting_version"


@dataclass(frozen=True)
class WaitingVersion:
    """Record of a registered version that waits until `promote_model` is called.

    Attributes:
        register: Options with which the version was registered, without credentials.
        holdout_digest: Digest of the rows of the holdout.
        label_col: Column with the labels.
        input_cols: Input columns of the model, if the model does not name them.
        group_col: Column with the groups of a ranking metric; None if there is none.
    """

    register: Mapping[str, Any]
    holdout_digest: str
    label_col: str
    input_cols: Sequence[str] = ()
    group_col: str | None = None

    @classmethod
    def of(
        cls, register: Register, holdout_digest: str, label_col: str, input_cols: Sequence[str], group_col: str | None
    ) -> Self:
        """Make the record of a version that is about to be registered."""
        # A query of the holdout runs again at the promotion: the files with its rows are removed when the job ends.
        if register.holdout.sql is not None:
            holdout = register.holdout.model_copy(update={"paths": (), "staging": None})
            register = register.model_copy(update={"holdout": holdout})
        # The options of a training function have further fields, which are among the arguments.
        options = redact_all(register.model_dump(mode="json", include=set(Register.model_fields)))
        return cls(options, holdout_digest, label_col, tuple(input_cols), group_col)

    def options(self) -> Register:
        """Return the options with which the version was registered."""
        return Register.parse(self.register)


def store(run: Run, record: WaitingVersion) -> dict[str, str]:
    """Store a record in the MLflow run, and return the tags that mark the version as waiting."""
    text = json.dumps(asdict(record))
    path = f"{_FOLDER}/{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    run.client.log_text(run.run_id, text, path)
    return {TAG: f"runs:/{run.run_id}/{path}", REASON_TAG: WAITING}


def load(version: ModelVersion) -> WaitingVersion:
    """Load the record of a registered version.

    Raises:
        InvalidArgumentError: The version has no record: it has never waited for a decision.
        JobError: The record cannot be read.
    """
    import mlflow

    name, uri = f"{version.name} version {version.version}", version.tags.get(TAG)
    if uri is None:
        raise InvalidArgumentError(
            f"{name} does not wait for a decision: only a job with register.promote=false registers such a version"
        )
    try:
        return WaitingVersion(**json.loads(mlflow.artifacts.load_text(uri)))
    except Exception as error:
        if is_unreachable(error):
            raise
        raise JobError(
            f"{name} cannot be promoted, because its rules and its holdout in {uri} cannot be read: "
            f"{str(error).strip() or type(error).__name__}. Train the model again, or set the alias in MLflow"
        ) from error
