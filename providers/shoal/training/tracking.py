"""Options of a job's MLflow run, models named by MLflow URIs or paths, and the MLflow calls of user code in workers:
they go to the job's run, whose experiment they may choose."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, field_validator, model_validator

from shoal.data.parquet.files import refuse_incomplete_address
from shoal.errors import InvalidArgumentError
from shoal.option_validation import Settings, optional
from shoal.secrets.redaction import redact_value
from shoal.training.locations import absolute_database, resolved
from shoal.training.reporting import GangContext
from shoal.training.timeouts import SET_EXPERIMENT_WAIT_S

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment
    from mlflow.entities import Run as MlflowRun


DEFAULT_EXPERIMENT = "shoal"
"""Name of the experiment for a job's MLflow run, if neither the spec of the job nor the caller names an experiment."""


class Tracking(Settings):
    """Options for the job's MLflow run. Credentials in the URI are not stored with the job.

    Example:
        >>> from shoal import RunConfig
        >>> from shoal.jobs import Tracking
        >>> RunConfig(tracking=Tracking(experiment="delays", tags={"team": "flights"}))
    """

    uri: str | None = optional(
        "URI of MLflow's tracking server or database. None: the URI of the caller's MLflow, if the caller "
        "has set a URI, an experiment or an active run; otherwise a database in $SHOAL_HOME."
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
    run_name: str | None = optional("Name of the MLflow run. None: the job's id and the number of the attempt.")
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

    if (found := client.get_experiment_by_name(name)) is None:
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


def registered_name(model: str) -> str | None:
    """Return the name of the registered model in a model's URI; None if the URI is of another kind."""
    found = re.match(r"models:/([^/@]+)[/@]", model)
    return None if found is None else found[1]


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


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call a function as soon as a module is imported, or at once if the module is already imported."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    """Entry of ``sys.meta_path`` for one module. Python's other finders find the module, and this finder makes sure
    that `act` is called after the import."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that calls `act`; return None for all other modules."""
        if fullname != self._name:
            return None
        # Only the finders behind this one: another `_Finder` for the same module would ask this one again.
        all_finders = sys.meta_path
        behind = all_finders[all_finders.index(self) + 1 :] if self in all_finders else all_finders
        for finder in behind:
            if (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._act)
                return spec
        return None


class _Loader(Loader):
    """Loader that loads a module with the module's own loader, and then calls `act`."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the module's own loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the module's own loader, and then call `act` with the module."""
        assert module.__spec__ is not None
        # The module's own loader is restored, because other code uses this loader, for example to read the module's
        # data files.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act(module)


ARTIFACTS = "SHOAL_MLFLOW_ARTIFACTS"
"""Environment variable with the URI of the folder for artifacts of new experiments; not set if MLflow's server decides
where artifacts are."""

JOB_RUN_TAG = "shoal.job_run"
"""Tag of the first MLflow run of a job. The value of the tag is the id of the run that the job uses now. The tag exists
only if rank 0 has called ``set_experiment``."""

FIRST_RUN_TAG = "shoal.first_run"
"""Tag of an MLflow run that has replaced the first run of a job. The value of the tag is the id of the first run."""

MOVED_NOTE = "mlflow_run"
"""Key of the note (message to the driver) with which rank 0 sends the id of the job's new run."""

_RUN_ID = "MLFLOW_RUN_ID"

_POLL_SECONDS = 0.25


def let_user_choose_experiment(gang: GangContext) -> None:
    """If the job has an MLflow run, replace ``mlflow.set_experiment`` by shoal's when user code imports MLflow."""
    if os.environ.get(_RUN_ID):
        job = _JobRun(gang, os.environ[_RUN_ID], os.environ.get("MLFLOW_TRACKING_URI"))
        after_import("mlflow", job.replace_set_experiment)


class _JobRun:
    """The job's MLflow run in this worker, with a method that replaces ``mlflow.set_experiment`` by shoal's version."""

    def __init__(self, gang: GangContext, first: str, uri: str | None) -> None:
        self._gang = gang
        self._first = first
        self._uri = uri

    def replace_set_experiment(self, mlflow: ModuleType) -> None:
        """Replace ``set_experiment`` in `mlflow` by a function that moves the job to a run in the chosen experiment."""
        original = mlflow.set_experiment

        @functools.wraps(original)
        def set_experiment(experiment_name: str | None = None, *args: Any, **options: Any) -> Experiment:
            # MLflow removes MLFLOW_RUN_ID from the environment when user code starts the job's run in this process. If
            # the variable is missing, user code has already started the job's run. The new experiment is then for
            # further runs, which do not belong to the job.
            if not os.environ.get(_RUN_ID):
                return original(experiment_name, *args, **options)
            # User code has chosen another tracking server, which does not have the job's run. Runs on that server do
            # not belong to the job.
            if mlflow.get_tracking_uri() != self._uri:
                del os.environ[_RUN_ID]
                return original(experiment_name, *args, **options)
            client = mlflow.MlflowClient()
            if self._gang.rank:
                run = self._wait_for_rank_0(client)
                os.environ[_RUN_ID] = run.info.run_id
                return original(experiment_id=run.info.experiment_id)
            if experiment_name is not None and os.environ.get(ARTIFACTS):
                experiment_id(client, experiment_name, os.environ[ARTIFACTS])
            experiment = original(experiment_name, *args, **options)
            os.environ[_RUN_ID] = self._find_or_create_run(client, experiment.experiment_id)
            return experiment

        mlflow.set_experiment = mlflow.tracking.fluent.set_experiment = set_experiment  # type: ignore[attr-defined]

    def _find_or_create_run(self, client: MlflowClient, experiment: str) -> str:
        """Find or create the job's MLflow run in an experiment, and return the run's id.

        If this worker has replaced a lost worker, it finds the run that the lost worker has created.
        """
        first = client.get_run(self._first)
        run = client.get_run(first.data.tags.get(JOB_RUN_TAG, self._first))
        if run.info.experiment_id != experiment:
            tags = {name: value for name, value in first.data.tags.items() if name != JOB_RUN_TAG}
            tags[FIRST_RUN_TAG] = self._first
            run = client.create_run(experiment, tags=tags, run_name=first.info.run_name)
        run_id = str(run.info.run_id)
        client.set_tag(self._first, JOB_RUN_TAG, run_id)
        self._gang.note({MOVED_NOTE: run_id})
        return run_id

    def _wait_for_rank_0(self, client: MlflowClient) -> MlflowRun:
        """Return the MLflow run that rank 0 has chosen, or the job's first run if rank 0 does not choose a run in
        time."""
        deadline = time.monotonic() + SET_EXPERIMENT_WAIT_S
        while (chosen := client.get_run(self._first).data.tags.get(JOB_RUN_TAG)) is None:
            if time.monotonic() > deadline:
                self._gang.log(
                    f"rank {self._gang.rank} called mlflow.set_experiment, but rank 0 did not call it within "
                    f"{SET_EXPERIMENT_WAIT_S:.0f} s: only rank 0's call has an effect, so the experiment of the job's "
                    "MLflow run is unchanged"
                )
                chosen = self._first
                break
            time.sleep(_POLL_SECONDS)
        return client.get_run(chosen)


def adopt_model(log: Callable[[str], None]) -> None:
    """Assign the worker's last logged model to the job's MLflow run, if user code logged the model without a run.

    The id of the job's run is in the environment variable MLFLOW_RUN_ID, but MLflow's `log_model` does not use this
    variable. A model that is logged without an active run therefore belongs to no run.
    """
    mlflow, run_id = sys.modules.get("mlflow"), os.environ.get("MLFLOW_RUN_ID")
    if mlflow is None or not run_id:
        return
    try:
        model = mlflow.last_logged_model()
        if model is not None and not model.source_run_id:
            output = mlflow.entities.LoggedModelOutput(model.model_id, step=0)
            mlflow.MlflowClient().log_outputs(run_id, models=[output])
    except Exception as error:
        log(f"the logged MLflow model could not be assigned to the job's run {run_id}: {error}")
