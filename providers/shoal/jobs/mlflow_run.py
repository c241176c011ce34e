"""Record a job's run in MLflow: its parameters, the metrics of every round, the dataset and the model."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import math
import os
import posixpath
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import SQLAlchemyError

from shoal.boosting_libraries import Framework
from shoal.errors import RegistryError
from shoal.jobs.files.storage import default_database, default_uri
from shoal.jobs.timeouts import MLFLOW_RETRIES
from shoal.lazy_imports import mlflow, pa, pd
from shoal.os_processes import variables_set
from shoal.secrets.redaction import redact_all, redact_value
from shoal.state.home import file_lock, subfolder
from shoal.training.locations import SQLITE, absolute_database
from shoal.training.tracking import FIRST_RUN_TAG, JOB_RUN_TAG, Caller, Tracking, checked_id, experiment_id

if TYPE_CHECKING:
    from shoal.jobs.journal.metric_points import MetricPoint

# Names of tags of a registered version: the attempt that registered it, and its holder.
JOB_TAG = "shoal.job_id"
ATTEMPT_TAG = "shoal.attempt"
HOLDER_TAG = "shoal.holder"

_UNREACHABLE = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED")
"""Codes of MLflow's errors if a server or database does not answer, or answers that it cannot work now."""

_BUSY = (408, 429)
"""Status codes below 500 with which a server answers that it cannot work now."""

_METRICS_PER_CALL = 1000
"""Largest number of metrics that MLflow accepts in one call of `log_batch`."""

MARK = "shoal"
"""Name of the entry in a model's MLflow metadata that marks the models that shoal has trained. The entry contains the
columns of margins, if the model was trained with them."""

_PARAMS_PER_CALL = 100
"""Largest number of parameters that MLflow accepts in one call of `log_batch`."""

_PARAM_LENGTH = 6000
"""Largest number of characters of a parameter's value in MLflow. Longer values are cut off."""

_NAME_LENGTH = 250
"""Largest number of characters that MLflow accepts in the name of a metric or tag."""

_SIGNATURE_ROWS = 100
"""Number of rows from which the model's signature is inferred. 100 rows are enough to find the types of the columns."""

_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
"""Variable with the number of times that MLflow's client repeats a request that the server does not answer."""

_NOISY = ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent", "mlflow.store.model_registry")


def available() -> bool:
    """Return whether MLflow is installed."""
    return importlib.util.find_spec("mlflow") is not None


def create_default_database() -> None:
    """Create the SQLite database in `$SHOAL_HOME` that MLflow uses by default, if there is none.

    The database gets its name when it is complete, so that a process that is killed meanwhile leaves no incomplete
    one. A database that another program has created meanwhile is kept.
    """
    path = default_database()
    if path.exists():
        return
    _quiet()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with _opening():
        if path.exists():
            return
        partial = path.with_name("mlflow.db.new")
        partial.unlink(missing_ok=True)
        try:
            SqlAlchemyStore(f"sqlite:///{partial}", artifacts_of(default_uri())).engine.dispose()
            with suppress(FileExistsError):
                path.hardlink_to(partial)
        finally:
            partial.unlink(missing_ok=True)


def uri_of(given: str | None = None) -> str:
    """Return the tracking URI to use: `given`, else $MLFLOW_TRACKING_URI, else the result of :func:`default_uri`."""
    # This URI must be equal to the one in a job's spec and in the store's records of promotions. Specs and records
    # contain the absolute path of an SQLite file, so the path is made absolute here, too.
    return absolute_database(given or os.environ.get("MLFLOW_TRACKING_URI") or default_uri())


def uri_of_job(in_spec: str | None) -> str:
    """Return the tracking URI of a job: the one in its spec, else the result of :func:`default_uri`. The environment
    counts only when the job is submitted, which writes it into the spec."""
    return in_spec or default_uri()


@contextmanager
def tracking_at(uri: str) -> Iterator[None]:
    """Let MLflow's functions use a tracking server or database in the block."""
    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    if before != uri:
        mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        if before != uri:
            mlflow.set_tracking_uri(before)


def tracking_of_training(environment: Mapping[str, str]) -> Tracking | None:
    """Return the default tracking options of a training that a script or notebook starts.

    The training records an MLflow run only if the caller uses MLflow.
    """
    return Tracking() if Caller.of(environment).tracks else None


def connect(uri: str) -> mlflow.MlflowClient:
    """Open an MLflow server or database, and return a client for it."""
    _quiet()
    with _opening():
        return mlflow.MlflowClient(uri)


def _quiet() -> None:
    """Turn off MLflow's telemetry, which would send data about users' trainings to MLflow's developers, and messages
    and progress bars that do not help users."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for logger in _NOISY:
        logging.getLogger(logger).setLevel(logging.WARNING)
    # MLflow warns if the Python environment has no pip, as in environments that uv creates. shoal does not need pip, so
    # the warning is not shown.
    logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)


def retry_briefly(environment: Mapping[str, str]) -> None:
    """Let requests to an MLflow server that is gone fail after about a minute, unless the user has set the number of
    retries.
    """
    os.environ.update(_few_retries(environment))


def retrying_briefly(environment: Mapping[str, str]) -> AbstractContextManager[None]:
    """Call `retry_briefly` for the `with` block only. Workers, which inherit variables, keep MLflow's own patience."""
    return variables_set(_few_retries(environment))


def _few_retries(environment: Mapping[str, str]) -> dict[str, str]:
    return {_RETRIES: os.environ.get(_RETRIES, environment.get(_RETRIES, str(MLFLOW_RETRIES)))}


def _opening() -> AbstractContextManager[object]:
    """Return the lock that a process holds while it opens an MLflow database, or creates an experiment there.

    The first process that opens a new SQLite database runs MLflow's migrations, which take some seconds. A second
    process that opened the database during that time would fail, so the lock makes other processes wait.
    """
    return file_lock(subfolder("mlflow") / "first.lock")


@dataclass
class Run:
    """The MLflow run of a job, with methods to record data in it.

    The job can move to another run (`move_to`), because user code may choose another experiment.

    Attributes:
        client: MLflow client.
        uri: Tracking URI.
        experiment_id: Id of the run's experiment.
        run_id: Id of the run.
        link: URL of the run's page, or for a local database the command that starts MLflow's web interface.
        left: Ids of the job's earlier runs, which the present run replaces.
    """

    client: mlflow.MlflowClient = field(repr=False)  # `repr` omits `client` and `uri`: both may contain credentials
    uri: str = field(repr=False)
    experiment_id: str
    run_id: str
    link: str
    left: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, tracking: Tracking, *, name: str, tags: Mapping[str, str]) -> Run:
        """Start an MLflow run, and create its experiment if the experiment does not exist.

        Raises:
            InvalidArgumentError: The experiment was deleted.
        """
        uri = uri_of_job(tracking.uri)
        client = connect(uri)
        mlflow.set_tracking_uri(uri)
        with _opening():
            if tracking.experiment_id is not None:
                experiment = checked_id(client, client.get_experiment(tracking.experiment_id))
            else:
                experiment = experiment_id(client, tracking.experiment, artifacts_of(uri))
        run = mlflow.start_run(
            experiment_id=experiment,
            parent_run_id=tracking.parent_run_id,
            run_name=redact_all(tracking.run_name or name),
            tags={**redact_all(tracking.tags), **tags},
            # MLflow would log only the system metrics of this node, which is the head, and none of the workers.
            log_system_metrics=False,
        )
        return cls(client, uri, experiment, run.info.run_id, _link(uri, experiment, run.info.run_id))

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters to the run, without credentials, and with values cut off if they are too long for MLflow."""
        values = {legal_name(name): str(value)[:_PARAM_LENGTH] for name, value in redact_all(dict(params)).items()}
        entities = [mlflow.entities.Param(*each) for each in values.items()]
        for part in _parts(entities, _PARAMS_PER_CALL):
            self.client.log_batch(self.run_id, params=part)

    def log_dataset(self, name: str, digest: str, source: Sequence[str], *, context: str) -> None:
        """Log a dataset as an input of the run."""
        shown = ", ".join(redact_value(path) for path in source)
        dataset = mlflow.entities.Dataset(name=name, digest=digest, source_type="parquet", source=shown)
        tag = mlflow.entities.InputTag("mlflow.data.context", context)
        self.client.log_inputs(self.run_id, [mlflow.entities.DatasetInput(dataset, [tag])])

    def log_metrics(self, metrics: Sequence[tuple[str, float, int, float]]) -> None:
        """Log metrics that were measured at different steps and times."""
        entities = [
            mlflow.entities.Metric(legal_name(name), value, int(when * 1000), step)
            for name, value, step, when in metrics
        ]
        for part in _parts(entities, _METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=part)

    def log_values(self, values: Mapping[str, float]) -> None:
        """Log one value per metric name, at step 0; NaN and infinite values are left out."""
        now = time.time()
        self.log_metrics([(name, value, 0, now) for name, value in values.items() if math.isfinite(value)])

    def log_record(self, folder: str, record: str) -> str:
        """Log a record in JSON to a file of the run with the record's digest as its name, and return the file's URI."""
        path = f"{folder}/{hashlib.sha256(record.encode()).hexdigest()[:16]}.json"
        self.client.log_text(self.run_id, record, path)
        return f"runs:/{self.run_id}/{path}"

    def logged_model(self) -> str | None:
        """Return the URI of the newest model that the user's code has logged to this run; None if there is none."""
        runs = [self.client.get_run(run_id) for run_id in (*self.left, self.run_id)]
        outputs = [output for run in runs if run.outputs for output in run.outputs.model_outputs]
        models = [self.client.get_logged_model(output.model_id) for output in outputs]
        newest = max(models, key=lambda model: model.creation_timestamp, default=None)
        return newest and str(newest.model_uri)

    def log_model(
        self, framework: Framework, booster: Any, sample: pd.DataFrame, *, base_margin_cols: Sequence[str] = ()
    ) -> str:
        """Log a model with its signature (the names and types of its columns), and return the model's URI."""
        from shoal.training.boosting.library import library_of

        library = library_of(framework)
        head = sample.head(_SIGNATURE_ROWS)
        rows = pa.Table.from_pandas(head, preserve_index=False)
        predicted = library.predictor(booster, list(head.columns)).predict_table(rows)
        signature = model_signature(
            rows.schema, head.columns, mlflow.models.infer_signature(model_output=predicted).outputs
        )
        # `log_model` takes 0.5 s if it gets the requirements as an argument. Otherwise MLflow runs the model to find
        # out which packages the model needs, and `log_model` takes 5.8 s.
        mark = {"base_margin_cols": list(base_margin_cols)} if base_margin_cols else {}
        info = library.log_model(
            booster,
            name="model",
            signature=signature,
            pip_requirements=[library.requirement()],
            metadata={MARK: mark},
        )
        return str(info.model_uri)

    def move_to(self, run_id: str) -> None:
        """Continue the job in another MLflow run, which a worker has created in the experiment that user code has
        chosen.

        The parameters are copied now. Workers may still log to the old run, so `finish` later copies the old run's
        metrics and deletes the old run.
        """
        if run_id == self.run_id:
            return
        info = self.client.get_run(run_id).info
        self._copy_params(self.run_id, run_id)
        mlflow.end_run()
        mlflow.start_run(run_id=run_id, log_system_metrics=False)
        self.left.append(self.run_id)
        self.run_id, self.experiment_id = run_id, str(info.experiment_id)
        self.link = _link(self.uri, self.experiment_id, run_id)

    def end_other(self, run_id: str, status: str, missing: Sequence[MetricPoint] = ()) -> None:
        """End the run of another attempt on the same MLflow server, if that run is still running, and add the metrics
        that its driver could not send."""
        first = self.client.get_run(run_id).data.tags.get(FIRST_RUN_TAG, run_id)
        last = self.client.get_run(first).data.tags.get(JOB_RUN_TAG, first)
        if self.client.get_run(last).info.status == "RUNNING":
            found = [(name, each, point.step, point.at) for point in missing for name, each in point.values.items()]
            replace(self, run_id=last).log_metrics(found)
            self.client.set_terminated(last, status)
        if last != first:
            self._merge(first, last)

    def finish(self, status: str) -> None:
        """End this MLflow run, and merge into it the runs that the job used before :meth:`move_to`."""
        mlflow.end_run(status)
        for run_id in self.left:
            self._merge(run_id, self.run_id)

    def _merge(self, left: str, into: str) -> None:
        """Copy the parameters and metrics of the run `left` into the run `into`, and delete the run `left`.

        `left` is kept if it has artifacts or models, because MLflow cannot move these to another run. Only a rank that
        has not called ``set_experiment`` can have logged artifacts or models to the old run.
        """
        run = self.client.get_run(left)
        if run.info.lifecycle_stage == "deleted":
            return
        self._copy_params(left, into)
        for name in run.data.metrics:
            for part in _parts(self.client.get_metric_history(left, name), _METRICS_PER_CALL):
                self.client.log_batch(into, metrics=part)
        if self.client.list_artifacts(left) or (run.outputs and run.outputs.model_outputs):
            self.client.set_terminated(left)
            print(f"the job now uses MLflow run {into}, but run {left} is kept, because it has artifacts", flush=True)
        else:
            self.client.delete_run(left)

    def _copy_params(self, source: str, target: str) -> None:
        known = self.client.get_run(target).data.params
        missing = [
            (name, value) for name, value in self.client.get_run(source).data.params.items() if name not in known
        ]
        for part in _parts([mlflow.entities.Param(*each) for each in missing], _PARAMS_PER_CALL):
            self.client.log_batch(target, params=part)


def legal_name(name: str) -> str:
    """Return a name with at most 250 characters, and with "_" in place of the characters that MLflow refuses in the
    names of metrics, parameters and tags, such as the "@" in ``ndcg@10``.

    MLflow also refuses names that a path library would shorten, such as ``/loss`` and ``train//loss``.
    """
    legal = re.sub(r"[^\w\-. :/]", "_", name)[:_NAME_LENGTH]
    if legal != posixpath.normpath(legal) or legal.startswith(("/", "..")) or legal == ".":
        legal = legal.replace("/", "_").replace(".", "_")
    return legal or "_"


def artifacts_of(uri: str) -> str | None:
    """Return the URI of the folder for artifacts of new experiments; None if MLflow's server chooses the folder."""
    if uri.startswith(("http://", "https://", "databricks", "uc:")):
        return None
    # Beside the database, because all who read the database then reach its artifacts, too. The driver may be on another
    # host, whose $SHOAL_HOME is lost with a pod.
    path = Path(uri.removeprefix(SQLITE).partition("?")[0])
    is_file = uri.startswith(SQLITE) and path.is_absolute() and path.name
    folder = path.with_name("artifacts") if is_file else subfolder("mlflow", "artifacts")
    return f"file://{folder}"


def _link(uri: str, experiment: str, run_id: str) -> str:
    shown = redact_value(uri)
    if shown.startswith(("http://", "https://")):
        return f"{shown.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"
    return f"{run_id} (to view it: mlflow ui --backend-store-uri {shown})"


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def model_signature(schema: pa.Schema, columns: Collection[str], outputs: Any) -> Any:
    """Return the signature of a model: the columns of its input, and MLflow's schema of its output.

    Most columns may have any type, because MLflow refuses integers for ``double``, floats for ``long`` and nulls for
    ``long`` and ``boolean``, and makes True of a null.
    """
    # MLflow reads timestamps in JSON only for columns of this type, to which it converts no zone.
    types = {
        name: "datetime" for name in columns if pa.types.is_timestamp(type_ := schema.field(name).type) and not type_.tz
    }
    any_type = mlflow.types.schema.AnyType()
    inputs = [mlflow.types.ColSpec(types.get(name, any_type), name) for name in columns]
    return mlflow.models.ModelSignature(mlflow.types.Schema(inputs), outputs)


def is_missing(error: Exception) -> bool:
    """Return whether an error of MLflow means that the model, version or run does not exist."""
    return getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST"


@contextmanager
def missing_ignored() -> Iterator[None]:
    """Leave the `with` block without an error if MLflow has no such model, version or run."""
    try:
        yield
    except mlflow.MlflowException as error:
        if not is_missing(error):
            raise


def is_unreachable(error: Exception) -> bool:
    """Return whether an error means that MLflow, or its storage of models, does not answer or cannot work now."""
    if isinstance(error, mlflow.MlflowException):
        return error.error_code in _UNREACHABLE
    # MLflow itself raises a plain OSError if a file does not exist.
    if isinstance(error, FileNotFoundError) or type(error) is OSError:
        return False
    response = getattr(error, "response", None)  # the errors of requests have the server's answer, if there was one
    if response is not None and response.status_code < 500 and response.status_code not in _BUSY:
        return False
    return isinstance(error, (SQLAlchemyError, OSError))


@contextmanager
def answering(uri: str) -> Iterator[None]:
    """Convert any error of MLflow that the `with` block raises into a `RegistryError`."""
    try:
        yield
    except (mlflow.MlflowException, SQLAlchemyError, OSError) as error:
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RegistryError(
            f"the MLflow registry {redact_value(uri)} cannot be used: {cause}. Check that the server runs, and "
            "that the tracking URI is right (--tracking-uri or MLFLOW_TRACKING_URI)"
        ) from error
