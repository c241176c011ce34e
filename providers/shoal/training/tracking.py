"""Define the options for a job's MLflow run, and fill in unset options from the caller's MLflow settings.

The functions for models tell apart the texts that name them: MLflow URIs, and paths of files or folders.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from shoal.data.parquet.files import refuse_incomplete_address
from shoal.errors import InvalidArgumentError
from shoal.option_validation import Settings
from shoal.secrets.redaction import redact_value
from shoal.training.locations import absolute_database, resolved

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment


DEFAULT_EXPERIMENT = "shoal"


class Tracking(Settings):
    """Options for the job's MLflow run. Credentials in the URI are not stored with the job.

    Example:
        >>> from shoal import RunConfig
        >>> from shoal.jobs import Tracking
        >>> RunConfig(tracking=Tracking(experiment="delays", tags={"team": "flights"}))
    """

    uri: str | None = Field(
        default=None,
        description="URI of MLflow's tracking server or database. None: the URI of the caller's MLflow, if the caller "
        "has set a URI, an experiment or an active run; otherwise a database in $SHOAL_HOME.",
    )
    experiment: str = Field(
        default=DEFAULT_EXPERIMENT,
        min_length=1,
        description="Name of the MLflow experiment, which is created if it does not exist. With the default, the "
        "caller's experiment is used, if the caller has set one in MLflow.",
    )
    experiment_id: str | None = Field(
        default=None, min_length=1, description="Id of the MLflow experiment, which must exist, instead of its name."
    )
    parent_run_id: str | None = Field(
        default=None,
        min_length=1,
        description="Id of the MLflow run under which the job's run is nested. None: the caller's active run, if any.",
    )
    run_name: str | None = Field(
        default=None, description="Name of the MLflow run. None: the job's id and the number of the attempt."
    )
    tags: dict[str, str] = Field(
        default_factory=dict, description="Tags that are set on the MLflow run in addition to shoal's own."
    )
    system_metrics: bool = Field(
        default=False,
        description="Whether to log the CPU, memory, disk, network and GPU usage of the nodes of a training function "
        "to the run, with MLflow's own collectors. False: only if the caller has enabled MLflow's system metrics. The "
        "usage of the workers is always logged.",
    )

    @field_validator("uri")
    @classmethod
    def _complete(cls, uri: str | None) -> str | None:
        if uri is not None:
            refuse_incomplete_address(uri, "uri")
        return uri

    @model_validator(mode="after")
    def _one_experiment(self) -> Self:
        if self.experiment_id is not None and self.experiment != DEFAULT_EXPERIMENT:
            raise ValueError(
                f'experiment="{self.experiment}" and experiment_id="{self.experiment_id}" both select an experiment: '
                "remove one of the two options"
            )
        return self

    def completed(self, caller: Caller) -> Tracking:
        """Return a copy of these options, in which unset options have the values of the caller's MLflow settings.

        If `uri` is not the caller's tracking URI, the caller's experiment and active run are not used, because `uri`
        names another server, which does not have them.
        """
        # The path of an SQLite file is made absolute, because the driver does not run in the caller's folder.
        uri = self.uri or caller.uri
        changes: dict[str, Any] = {
            "uri": uri and absolute_database(uri),
            "system_metrics": self.system_metrics or caller.system_metrics,
        }
        if self.uri is None or self.uri == caller.uri:
            if self.experiment_id is None and self.experiment == DEFAULT_EXPERIMENT:
                changes["experiment_id"] = caller.experiment_id
                changes["experiment"] = caller.experiment or DEFAULT_EXPERIMENT
            changes["parent_run_id"] = self.parent_run_id or caller.run_id
        return self.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Caller:
    """MLflow settings of the process that submits a job: its tracking URI, experiment and active run.

    Attributes:
        uri: Tracking URI that the caller has set. None: the caller has set neither a URI nor an experiment, and has no
            active run.
        experiment: Name of the caller's experiment; None if the caller has no experiment, or if the id of the
            experiment is known.
        experiment_id: Id of the caller's experiment.
        run_id: Id of the caller's active run.
        system_metrics: Whether the caller has enabled MLflow's system metrics
            (``mlflow.enable_system_metrics_logging``).
    """

    uri: str | None = None
    experiment: str | None = None
    experiment_id: str | None = None
    run_id: str | None = None
    system_metrics: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Caller:
        """Read the MLflow settings of this process, without importing MLflow. If MLflow is not imported yet, read them
        from environment variables only.

        ``mlflow.set_tracking_uri`` and ``mlflow.set_experiment`` set these environment variables, too.
        """
        mlflow = sys.modules.get("mlflow")
        # While another thread is still importing MLflow, the attribute `active_run` may be missing.
        active_run = getattr(mlflow, "active_run", None)
        run = active_run() if active_run else None
        experiment_id = run.info.experiment_id if run else environment.get("MLFLOW_EXPERIMENT_ID") or None
        experiment = None if experiment_id else environment.get("MLFLOW_EXPERIMENT_NAME") or None
        uri = environment.get("MLFLOW_TRACKING_URI") or None
        if uri is None and mlflow is not None and active_run and (experiment_id or experiment):
            # Without a URI, MLflow uses an SQLite file in the current folder.
            uri = mlflow.get_tracking_uri()
        system_metrics = environment.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "").lower() in ("true", "1")
        return cls(uri, experiment, experiment_id, run.info.run_id if run else None, system_metrics)

    @property
    def tracks(self) -> bool:
        """Whether the caller uses MLflow: the caller has set a URI or an experiment, or has an active run."""
        return any((self.uri, self.experiment, self.experiment_id, self.run_id))


"""Name of the experiment for a job's MLflow run, if neither the spec of the job nor the caller names an experiment."""

_FOLDER_LENGTH = 80
_FOLDER = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_. -]{{0,{_FOLDER_LENGTH - 1}}}")
"""Pattern of the experiment names that are used unchanged as folder names. Other characters are not allowed, because
the folder name becomes part of a file URI, in which `%`, `#` and `?` have a special meaning."""


def experiment_id(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Return the id of the experiment with the given name; create the experiment if it does not exist.

    Raises:
        InvalidArgumentError: The experiment was deleted.
    """
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is not None:
        return checked_id(client, found)
    try:
        location = artifacts and f"{artifacts}/{folder_of(name)}"
        return str(client.create_experiment(name, artifact_location=location))
    except MlflowException:
        # Another process may have created the experiment in the meantime.
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return checked_id(client, found)


def checked_id(client: MlflowClient, experiment: Experiment) -> str:
    """Return the id of an experiment that exists in MLflow.

    Raises:
        InvalidArgumentError: The experiment was deleted. MLflow keeps its name until it is deleted permanently.
    """
    number = str(experiment.experiment_id)
    if experiment.lifecycle_stage == "deleted":
        command = f"MLFLOW_TRACKING_URI={redact_value(client.tracking_uri)} mlflow experiments restore -x {number}"
        raise InvalidArgumentError(
            f'the MLflow experiment "{experiment.name}" (id {number}) was deleted, so it takes no runs: restore it '
            f"with `{command}`, or name another experiment in tracking"
        )
    return number


def folder_of(experiment: str) -> str:
    """Convert the name of an experiment to the name of the folder for the experiment's artifacts.

    If the name of the experiment is too long or contains illegal characters, the name is cut, the illegal characters
    are replaced, and a digest is appended. The folder is therefore always inside its parent folder, and no two
    experiments share a folder.
    """
    if _FOLDER.fullmatch(experiment):
        return experiment
    legal = re.sub(r"[^A-Za-z0-9_-]+", "_", experiment)[:_FOLDER_LENGTH]
    return f"{legal}-{hashlib.sha256(experiment.encode(errors='surrogatepass')).hexdigest()[:12]}"


MODEL_VERSION = re.compile(r"models:/(?P<name>[^/@]+)/(?P<version>\d+)")
"""Pattern of the URIs that name a version of a registered model by its number."""
_REGISTERED = re.compile(r"models:/([^/@]+@[^/@]+|[^/@]+/[0-9]+|m-[0-9a-f]{32})")
"""Pattern of the URIs that name a version or an alias. A stage or "latest" is not accepted, because the version that it
means may change during a run."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""Start of a model's URI, such as ``runs:/`` or ``s3://``."""


def is_model_path(model: str) -> bool:
    """Return whether the text that names a model is a path, and not a URI."""
    return not _URI.match(model)


def is_mlflow_uri(model: str) -> bool:
    """Return whether the text that names a model is a URI that only MLflow can resolve."""
    return model.startswith(("models:/", "runs:/"))


def absolute_model(model: str) -> str:
    """Return the text that names a model, with an absolute path if it is a path."""
    return resolved(model, "model") if is_model_path(model) else model


def check_model_version(model: str) -> None:
    """Check that the URI of a registered model names a version or an alias.

    Raises:
        InvalidArgumentError: The URI names neither.
    """
    if model.startswith("models:/") and not _REGISTERED.fullmatch(model):
        raise InvalidArgumentError(
            f'model "{model}" names no version: write models:/NAME@ALIAS or models:/NAME/VERSION'
        )
