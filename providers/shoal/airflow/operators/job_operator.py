"""Base class of operators that run a job on a pool, with the links and the lineage of the job.

Also here: a check that the DAG leases nodes of the task's pool.
"""

from __future__ import annotations

import difflib
import re
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from airflow.sdk import BaseOperator, BaseOperatorLink, get_current_context
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.definitions.context import Context
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import AirflowTaskTimeout

from shoal import jobs
from shoal.airflow import results
from shoal.airflow.deployment import has_teams
from shoal.airflow.operators import base
from shoal.airflow.operators.nodes import LeasePoolOperator, ScaleClusterOperator, outside_of_lease
from shoal.data.connections import split_storage
from shoal.errors import LeaseEndedError, NoTokenError, PoolDownError, PoolElsewhereError, ShoalError
from shoal.links import dashboard_link, job_page, mlflow_run_link, model_link
from shoal.pool.spec import PoolSpec, is_uri

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage


class _Link(BaseOperatorLink):
    """Link whose address the operator has stored in its attribute `links`."""

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address of this link; an empty string if the link has no address. Airflow calls this method in the
        process of the task, when the task has ended."""
        return str(getattr(operator, "links", {}).get(self.name, ""))


class JobPageLink(_Link):
    """Link to the job on shoal's page, with its progress, log and error."""

    name = "Job"


class MlflowRunLink(_Link):
    """Link to the job's run in MLflow."""

    name = "MLflow run"


class ModelVersionLink(_Link):
    """Link to the version of the registered model in MLflow."""

    name = "Model version"


class RayDashboardLink(_Link):
    """Link to the dashboard of a ``ray://`` pool's cluster. Local pools have no such link, because their dashboard
    needs a token."""

    name = "Ray dashboard"


LINKS = (JobPageLink(), MlflowRunLink(), ModelVersionLink(), RayDashboardLink())


def page_links(job_id: str) -> dict[str, str]:
    """Return the address of a job's page in a dict, with the name of the link as the key. The dict is empty if there is
    no page.

    The address begins with ``$SHOAL_UI_URL`` if this variable is set, and otherwise leads to the page in Airflow, in an
    Airflow with several teams to that of the team. Call this function only in a task.
    """
    from shoal.airflow.plugin import has_extra, page_path

    if (given := job_page(job_id)) is not None:
        return {JobPageLink.name: given}
    team = getattr(get_current_context()["dag_run"], "team_name", None) if has_teams() else None
    path = f"{page_path()}teams/{quote(team, safe='')}/" if team else page_path()
    return {JobPageLink.name: f"{path}jobs/{quote(job_id, safe='')}"} if has_extra() else {}


def show_links(links: Mapping[str, str], ti: Any) -> None:
    """Show links of a task while the task runs. Airflow itself stores the links only when the task has ended."""
    # Airflow's UI reads the links from the database, past an XCom backend that the user has configured.
    with suppress(Exception):  # the links appear when the task has ended
        of = {"dag_id": ti.dag_id, "task_id": ti.task_id, "run_id": ti.run_id, "map_index": ti.map_index}
        for link in LINKS:
            if address := links.get(link.name):
                BaseXCom._set_xcom_in_db(link.xcom_key, address, **of)


def links_of(spec: jobs.AnyJobSpec, result: jobs.JobResult, pool: PoolSpec) -> dict[str, str]:
    """Return the addresses of a job's links by name."""
    uri = spec.tracking.uri if spec.tracking else None
    register, version = spec.register_as, result.model_version
    model = model_link(uri, register.model, version) if register and version else None
    found = (mlflow_run_link(uri, result.mlflow_run_id), model, dashboard_link(pool.address))
    return page_links(result.job_id) | {link.label: link.address for link in found if link is not None}


_JOB_ID = "shoal_job_id"
"""Key under which the id of the task's job is stored in Airflow's task state."""

_KILL_CHECK_S = 0.2
"""Seconds between two checks whether Airflow has killed the task. A killed task has only 5 s to end."""


class JobOperator(base.LabelledOperator, base.WaitingOperator):
    """Base class of operators that submit a job, copy its log to the task's log, and wait for its result.

    :param durable: Whether a retry attaches to the job of an earlier try if this job still runs, and takes the job's
        result if the job has succeeded. False: a retry ends the job of an earlier try and submits a new one.
    :param cancel_on_kill: Whether the job is cancelled when Airflow ends the task, because a user clears or marks the
        task, or because the task times out. False: the job goes on until a try of the task attaches to it, or the
        teardown ends it.
    """

    operator_extra_links = LINKS

    def __init__(self, *, durable: bool = True, cancel_on_kill: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.durable = durable
        self.cancel_on_kill = cancel_on_kill
        self.links: dict[str, str] = {}
        self._deadline: float | None = None
        self._is_resumed = False
        self._submitted: jobs.AnyJobSpec | None = None
        self._done: tuple[jobs.AnyJobSpec, jobs.JobResult] | None = None

    def prepare_template(self) -> None:
        """Warn if no task of the DAG leases nodes of this task's pool (see `missing_lease`). Airflow calls this method
        when the DAG is complete."""
        super().prepare_template()
        if (message := missing_lease(self)) is not None:
            warnings.warn(message, stacklevel=2)

    @abstractmethod
    def job_spec(self, context: Context) -> jobs.AnyJobSpec:
        """Build the job's spec from the operator's arguments."""

    def value_of(self, result: jobs.JobResult) -> Any:
        """Convert the result of a job to the value that the task returns."""
        return result.to_dict()

    @results.no_retry_of_permanent_errors()
    def execute(self, context: Context) -> Any:
        """Submit the job (or attach to the job of an earlier try of this task), wait until the job ends, and return the
        job's result as a dict."""
        return self._execute(context)

    # `execute_complete` calls `_execute` and not `execute`, because Airflow warns if another method calls `execute`.
    def _execute(self, context: Context) -> Any:
        with self._storing_failures(context):
            self._submitted = spec = self.job_spec(context)
            handle = self.submit_job(spec, context)
            if not self.wait_for_completion:
                return {"job_id": handle.job_id, "attempt": handle.attempt, "pool": handle.pool}
            # Airflow does not defer a killed task. So a killed task goes on to `_wait_for`, which cancels the job.
            if self.deferrable and not self.is_killed:
                # The triggerer has no credentials, so an Airflow worker has to send them to the job's driver. A queued
                # job has no driver yet. When its driver has started, the trigger fires an event, and the task continues
                # in a worker, which sends the credentials (see `execute_complete`).
                handle.deliver_credentials(while_queued=False)
            if self.deferrable and not self.is_killed and not handle.has_ended:
                self._defer_to(handle, context)
            result = self._wait_for(handle)
        return self._value(context, spec, result)

    @results.no_retry_of_permanent_errors()
    def execute_complete(self, context: Context, event: Mapping[str, Any], job: Mapping[str, Any]) -> Any:
        """Continue the task after its deferral: return the result of the job as a dict, or raise the job's error.

        The event may belong to the trigger of an earlier try. Airflow deletes the trigger of a task that is cleared,
        and SQLite gives the id of the deleted trigger to the next one. So if the job of this try goes on, the task is
        deferred again.

        :param job: The job, as `_defer_to` has described it.
        :raises AirflowTaskTimeout: The task has exceeded its `execution_timeout`. The task's job is cancelled.
        """

        # The job's driver waits for credentials. The task attaches to its job, even if `durable` is False or the DAG
        # file has changed, and sends the credentials.
        if event.get("wants_credentials"):
            self.durable = self._is_resumed = True
            self._deadline = job.get("deadline")
            return self._execute(context)
        with self._storing_failures(context):
            actor = self.holder_in(context)
            handle = jobs.attach(job["job_id"], job["attempt"], submissions=job["submissions"], actor=actor)
            self.links, self._submitted = page_links(handle.job_id), handle.spec
            is_of_job = all(event[name] == value for name, value in job.items() if name != "deadline")
            timed_out = event["timed_out"] and is_of_job
            if self.deferrable and not (timed_out or self.is_killed or handle.has_ended):
                self._deadline = job.get("deadline")
                self._defer_to(handle, context)
            if timed_out and not handle.has_ended:
                reason = f"task {self.task_id} was not done within its execution_timeout of {self.execution_timeout}"
                self._cancel(handle, reason)
                raise AirflowTaskTimeout(reason)
            spec, result = self._submitted, self._wait_for(handle, event["log_position"] if is_of_job else 0)
        return self._value(context, spec, result)

    @contextmanager
    def _storing_failures(self, context: Context) -> Iterator[None]:
        try:
            yield
        except ShoalError as error:
            results.record_failure(context, self._submitted or getattr(self, "spec", None) or self.task_id, error)
            raise

    def _value(self, context: Context, spec: jobs.AnyJobSpec, result: jobs.JobResult) -> Any:
        results.record_success(context, spec, result)
        results.skip_without_training(result)
        return self.value_of(result)

    def submit_job(self, spec: jobs.AnyJobSpec, context: Context) -> jobs.JobHandle:
        """Submit the job, or attach to the job of an earlier try of this task."""

        # A spec that names a pool has precedence over Airflow's default connection.
        hook = self.hook
        if self.pool_name or self.compute_pool_conn_id or (not spec.run_config.pool_name and hook.spec):
            spec = spec.on_pool(hook.pool().name)
        ti = context["ti"]
        digest = None if self._is_resumed else base.digest_as_written(self)
        submission = self.submission(context, hook, durable=self.durable, digest=digest)
        try:
            handle = jobs.submit(
                spec, detached=not self.wait_for_completion, needs_lease=self.lease is not None, **submission
            )
        except (PoolDownError, LeaseEndedError) as error:
            if self.lease is None or isinstance(error, PoolElsewhereError | NoTokenError):
                raise
            raise type(error)(f"{error}. {self.setup_advice(context)}") from error
        self.log.info("job %s, attempt %d, on pool %s", handle.job_id, handle.attempt, handle.pool)
        if handle.was_collected:
            self.log.info(
                "an earlier try of the task had the job's result: it is used again, until the task is cleared"
            )
        # Airflow 3.3 and later show the task's state in the UI. shoal never reads this id.
        if (state := context.get("task_state_store")) is not None:
            try:
                state.set(_JOB_ID, handle.job_id)
            # The job runs, so the task must not fail if the job's id cannot be stored.
            except Exception:
                self.log.warning("the job's id could not be stored in the task's state", exc_info=True)
        # The link is set before the job has ended, so that the task has the link even if the job fails.
        self.links = page_links(handle.job_id)
        show_links(self.links, ti)
        return handle

    def _defer_to(self, handle: jobs.JobHandle, context: Context) -> None:
        from shoal.airflow.triggers import JobTrigger

        job: dict[str, Any] = {"job_id": handle.job_id, "attempt": handle.attempt, "submissions": handle.submissions}
        limit = self.execution_timeout
        deadline = self._deadline or (None if limit is None else time.time() + limit.total_seconds())
        trigger = JobTrigger(
            **job,
            pool=handle.pool,
            task_try=context["ti"].try_number,
            cancel_on_kill=self.cancel_on_kill,
            poll_interval=self.poll_interval,
            deadline=deadline,
        )
        kwargs = {"job": {**job, "deadline": deadline}}
        self.defer(trigger=trigger, method_name="execute_complete", kwargs=kwargs)

    def _wait_for(self, handle: jobs.JobHandle, log_position: int = 0) -> jobs.JobResult:
        from shoal.pool.api import ComputePool

        # Airflow ends a task with a signal, which raises an exception in the main thread. This exception must not
        # interrupt a transaction, so another thread waits for the job.
        stop = Event()
        with ThreadPoolExecutor(1) as threads:
            result = threads.submit(handle.wait, on_log=self.log.info, stop=stop, log_position=log_position)
            try:
                while not wait([result], timeout=_KILL_CHECK_S).done:
                    self.end_if_killed()
                    base.end_if_worker_is_lost()
            except base.WorkerLostError:
                stop.set()
                raise
            # Airflow has killed the task, or the task has exceeded its execution_timeout. Do not cancel the job if a
            # newer try of the task has attached to it: if Airflow loses contact with a worker or a scheduler, Airflow
            # starts the new try before it kills the old one.
            except BaseException as end:
                try:
                    self._cancel(handle, str(end) or f"task {self.task_id} was ended")
                finally:
                    stop.set()
                raise
        self._done = handle.spec, result.result()
        try:
            pool = PoolSpec.parse(ComputePool(handle.pool, is_named=False).describe().uri)
            self.links = links_of(*self._done, pool)
        # The job has succeeded, so the task must not fail because a link cannot be built.
        except Exception:
            self.log.warning("the links of the task could not be found", exc_info=True)
        return result.result()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:
        """Return the data and models that the job has read and written; None if the task has not waited for a job.
        Airflow's OpenLineage provider calls this method when the task has ended."""
        return None if self._done is None else lineage_of(*self._done)

    def _cancel(self, handle: jobs.JobHandle, reason: str) -> None:
        """Cancel the task's job, unless `cancel_on_kill` is False or a newer try of the task has attached to the
        job."""
        if not self.cancel_on_kill:
            self.log.info("job %s goes on (cancel_on_kill=False)", handle.job_id)
        elif not handle.cancel(reason, unless_resubmitted=True):
            self.log.info(
                "job %s is not cancelled: it has ended, or a newer try of the task has attached to it", handle.job_id
            )


def missing_lease(task: BaseOperator | MappedOperator) -> str | None:
    """Return a warning if a task runs its job on a pool, and no task of the DAG leases nodes of this pool for it;
    otherwise None.

    A pool that is always up needs no lease. So there is no warning for a task that gives only the name of a pool, and
    is outside of all `pool_for_run` blocks.

    :param task: Task of a complete DAG that submits a job.
    """
    arguments = base.arguments_of(task)
    name, dag = arguments.get("pool_name"), task.get_dag()
    if dag is None or not isinstance(name, str) or not (arguments.get("lease") or is_uri(name)):
        return outside_of_lease(task)
    lessees = [one for one in dag.tasks if isinstance(one, LeasePoolOperator | ScaleClusterOperator)]
    # If the name of a pool is missing or contains a template, there is no warning, because the pool is not known before
    # the run.
    if not all(
        isinstance(other, str) and base.is_known(other) for other in [name, *(one.pool_name for one in lessees)]
    ):
        return None
    pool, leased = base.pool_of(arguments), [base.pool_of(vars(one)) or "" for one in lessees]
    if pool is None or pool in leased:
        return outside_of_lease(task)
    near = difflib.get_close_matches(pool, leased, n=1)
    return f"task {task.task_id} runs on the pool {pool}, but no task of the DAG leases nodes of this pool: " + (
        f"did you mean {near[0]}?"
        if near
        else "use pool_for_run; if the pool is always up, pass only its name as pool_name instead"
    )


MODELS = "shoal://models"
"""OpenLineage namespace of registered models. The namespace, a slash and the model's name are the URI of the model's
asset in Airflow."""

_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
"""Alternative URI schemes, each with the scheme that OpenLineage uses for the same storage."""

_KEEPS_SLASH = ("hdfs", "webhdfs")
"""URI schemes of file systems, where a path begins with a slash. In all other schemes, the path is the key of an
object, without a slash at its beginning."""

_WILDCARD = re.compile(r"[*?\[]")

_VERSION = re.compile(r"models:/([^/@]+)/(\w+)")


class Named(NamedTuple):
    """OpenLineage name of a dataset or of a registered model. Only a table and a registered model have a version."""

    namespace: str
    name: str
    version: str | None = None


def of_path(path: str) -> Named:
    """Return the OpenLineage name of a file or folder.

    For a path with a wildcard, the name is that of the folder that contains the matching files.

    :param path: Absolute path or URI.
    """
    if (wildcard := _WILDCARD.search(path)) is not None:
        path = path[: wildcard.start()].rpartition("/")[0]
    parts = urlsplit(split_storage(path)[1])
    if parts.scheme in ("", "file"):
        return Named("file", (unquote(parts.path) if parts.scheme else path).rstrip("/") or "/")
    scheme = _SCHEMES.get(parts.scheme, parts.scheme)
    name = parts.path.rstrip("/") if scheme in _KEEPS_SLASH else parts.path.strip("/")
    return Named(f"{scheme}://{parts.netloc}", name or "/")


def read_by(spec: jobs.AnyJobSpec, result: jobs.JobResult) -> Iterator[Named]:
    """Yield the OpenLineage names of the files that a job has read and, for a prediction job, of the model. Rows of a
    database and staged copies of rows are left out, because they have no OpenLineage name."""
    for dataset in spec.datasets():
        if dataset.staging is None:
            is_trained_on = dataset is getattr(spec, "dataset", None) and result.data is not None
            version = result.data.version if is_trained_on and result.data else dataset.version
            for path in dataset.paths:
                yield of_path(path)._replace(version=None if version is None else str(version))
    if result.output_path is not None and (model := _VERSION.fullmatch(result.model_uri)) is not None:
        yield Named(MODELS, *model.groups())


def written_by(spec: jobs.AnyJobSpec, result: jobs.JobResult) -> Iterator[Named]:
    """Yield the OpenLineage names of a job's outputs: for a prediction job the predictions, otherwise the registered
    model version and the model's file."""
    if result.output_path is not None:
        yield of_path(result.output_path)
        return
    if spec.register_as is not None and result.model_version:
        yield Named(MODELS, spec.register_as.model, result.model_version)
    if result.model_path:
        yield of_path(result.model_path)


def lineage_of(spec: jobs.AnyJobSpec, result: jobs.JobResult) -> OperatorLineage:
    """Return a job's inputs and outputs as an object of Airflow's OpenLineage provider, which has to be installed."""
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset
    from openlineage.client.facet_v2 import dataset_version_dataset, sql_job

    def datasets(named: Iterable[Named]) -> list[Dataset]:
        facet = dataset_version_dataset.DatasetVersionDatasetFacet
        return [
            Dataset(
                namespace=one.namespace,
                name=one.name,
                facets={"version": facet(datasetVersion=one.version)} if one.version else {},
            )
            for one in dict.fromkeys(named)
        ]

    queries = dict.fromkeys(dataset.sql for dataset in spec.datasets() if dataset.sql is not None)
    return OperatorLineage(
        inputs=datasets(read_by(spec, result)),
        outputs=datasets(written_by(spec, result)),
        job_facets={"sql": sql_job.SQLJobFacet(query="\n;\n".join(queries))} if queries else {},
    )
