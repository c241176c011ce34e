"""Run one attempt of a job in its driver, a process on the pool's head.

The command is ``python -m shoal.jobs.driver JOB_ID ATTEMPT [LIBRARY]``. The driver imports LIBRARY, ``xgboost``
or ``lightgbm``, before it forks the template of its workers.

The driver trains or predicts, logs to MLflow, compares a model with the champion, writes the result into the job's row,
and cleans up. The driver ends itself if the job was cancelled, if its time limit is over, or if no process has polled
the job for `orphan_after` seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shoal import telemetry
from shoal.data.connections import CONNECTION_PREFIX
from shoal.errors import CapacityError, JobError, MissingExtraError, ShoalError, TrainingError, UnusableGpuError
from shoal.jobs import credentials, mlflow_run, remote_files, shipped_code
from shoal.jobs.credentials import AttemptTakenError, Secrets, receive
from shoal.jobs.driver import leaving_nodes, table_versions
from shoal.jobs.driver.attempt_context import AttemptContext, Stopwatch, before_work, only_printed
from shoal.jobs.driver.attempt_metrics import MetricSeries, MlflowFeed
from shoal.jobs.driver.heartbeats import HeartbeatThread, job_nodes
from shoal.jobs.driver.leaving_nodes import LeavingWatch
from shoal.jobs.files import staged_rows, storage
from shoal.jobs.files.logs import log_path, teed, write_rest
from shoal.jobs.journal import attempts, job_queue, metric_points
from shoal.jobs.journal.attempts import End, Key
from shoal.jobs.journal.steps import JobStep, act, patiently
from shoal.jobs.kind import driver_of, parse_spec
from shoal.jobs.mlflow_run import ATTEMPT_TAG, HOLDER_TAG, JOB_TAG, Run, is_unreachable
from shoal.jobs.reconcile import rounds
from shoal.jobs.results import JobResult
from shoal.jobs.spec import AnyJobSpec
from shoal.jobs.timeouts import DRIVER_END_S
from shoal.lazy_imports import ray
from shoal.node_register import NodeRegister
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.backends.local.gpus import ALL
from shoal.pool.endpoint import NO_GCS, is_on_loopback
from shoal.pool.holder import TEAM_VARIABLE
from shoal.pool.spec import PoolSpec
from shoal.secrets.hidden_output import SECRETS, hidden_output
from shoal.secrets.redaction import hiding
from shoal.state import Store
from shoal.state.databases import dump_json
from shoal.state.schema import Job, JobState
from shoal.training import cluster
from shoal.training.boosting.library import library_of
from shoal.training.demand import NodeSize
from shoal.training.gang.child import fork_template
from shoal.training.gang.child_processes import use_nodes, use_template
from shoal.training.host import own_process
from shoal.training.host.imports import before_forks, import_lean
from shoal.training.host.own_process import ending_forks
from shoal.training.tracking import ARTIFACTS

_STOPPED = End(
    JobState.CANCELLED,
    "the driver was stopped by SIGTERM, but the job was not cancelled with shoal: an operator, the operating system or "
    "a client of the head's Job API has sent the signal",
)

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable in which Ray passes the configuration of a submitted job to its driver, as JSON."""

_MOST_CHARACTERS = 20_000
"""Length of the longest error that is stored whole. Lists of jobs, task logs and the page show errors."""

_NODE_SECONDS = "system/node_seconds"
"""Name of the metric in MLflow, which shows it beside the usage of CPUs and memory."""

_RUN_STATUS = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}
"""Status that MLflow's run gets for each final state of the attempt."""


class _StopRequested(BaseException):
    """Exception that the SIGTERM handler raises to stop the job, for example after a cancellation or a timeout.

    The exception is a `BaseException`, so that no `except Exception` in the job's code catches it.
    """


class Driver:
    """Runner of one attempt of a job. It also records the end of the attempt.

    Args:
        store: Store that has the attempt's row.
        job: The attempt's row.
        spec: Spec of the job, with its credentials.
        secrets: Credentials, which the workers get, but which must not appear in the log and in the attempt's row.
    """

    def __init__(self, store: Store, job: Job, spec: AnyJobSpec, secrets: Secrets) -> None:
        self._store = store
        self._job = job
        self._key = Key(job.id, job.attempt)
        self._spec = spec
        self._secrets = secrets
        self._metrics = MetricSeries(self._key)
        self._heartbeats = HeartbeatThread(store, self._key, self._metrics, spec.run_config)
        self._leaving = LeavingWatch(store, job.pool)
        self._stopwatch = Stopwatch(job, time.time())
        self._run: Run | None = None
        self._told_to_end = False

    def run(self) -> int:
        """Run the attempt until it has ended, and return the exit code for this process.

        The end of the attempt is stored first. Then the next waiting job of the pool has room and is started, before
        the clean-up, which may wait for MLflow. Errors in the clean-up are only printed.
        """
        self._heartbeats.start()
        end = self._until_end()
        # The heartbeat thread is stopped first. Otherwise it could end this process (with SIGTERM, later with
        # `os._exit`) before the attempt's end is stored.
        self._heartbeats.stop()
        self._leaving.stop()
        stored = self._store_end(end)
        if stored:
            with only_printed("the next job that waits for the pool could not be started"):
                rounds.start_next(self._store, self._job.pool)
        # Not earlier, because workers may inherit the variable, and user code in them keeps MLflow's own patience.
        mlflow_run.retry_briefly(self._spec.run_config.env)
        with act(JobStep.TIDY):
            with only_printed("the rows of SQL queries could not be removed"):
                staged_rows.discard(staged_rows.locations(self._spec, self._key).values())
            with only_printed("staged data could not be removed"):
                staged_rows.give_up(self._key, self._spec.staged())
            with only_printed("the working folder could not be removed"):
                storage.discard(self._key.submission_id)
        with only_printed("credentials that were written too late could not be removed"):
            credentials.discard(self._key.submission_id)
        status = _RUN_STATUS[end.state] if stored else "KILLED"
        if self._run:
            self._end_run(self._run, status)
        return 0 if stored and end.state is JobState.SUCCEEDED else 1

    def _end_run(self, run: Run, status: str) -> None:
        """Send the last metrics to the MLflow run, and end it."""
        try:
            self._metrics.close()
        except Exception as error:
            print(f"not all metrics could be sent to the MLflow run: {error}", flush=True)
            if is_unreachable(error):
                return  # the next requests would wait for a minute each, too
        with only_printed("the node-seconds could not be logged to MLflow"):
            if (node_seconds := self._node_seconds()) is not None:
                run.log_values({_NODE_SECONDS: node_seconds})
        with only_printed(f"the MLflow run could not be marked {status}"):
            run.finish(status)

    def _until_end(self) -> End:
        """Run the attempt until it ends or a SIGTERM stops it. Then ignore further SIGTERMs, and return the attempt's
        end."""
        end: End | None = None
        try:
            with ending_forks():
                end = self._attempt()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except _StopRequested:
            end = end or self._heartbeats.reason or _STOPPED
        return end

    def _attempt(self) -> End:
        try:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._connect(self._job.endpoint["gcs"])
            driver_of(self._spec).begin()
            self._begin_run()
            result, results_digest = self._work(self._run)
            result = result.model_copy(update={"node_seconds": self._node_seconds()})
            state = JobState.FAILED if result.failure else JobState.SUCCEEDED
            is_permanent = False if result.failure else None
            return End(state, result.failure, is_permanent, result, results_digest)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # user code may raise SystemExit when unpickled
            # If the SIGTERM handler raised `_StopRequested` inside Ray's compiled code, Ray has replaced the exception
            # by a SystemError. So `_StopRequested` is raised again here.
            if self._told_to_end:
                raise _StopRequested from error
            # A ShoalError is printed without a traceback, because its message is written for users.
            if not isinstance(error, ShoalError):
                print(traceback.format_exc(), flush=True)
            elif self._spec.prints_notes or isinstance(error, TrainingError):
                # The error's notes contain the traceback of each rank that failed, often in the user's code.
                print(*getattr(error, "__notes__", ()), sep="\n", flush=True)
            cause = _cause(error)
            return End(
                JobState.FAILED,
                error=cause + self._expiry_hint(cause),
                error_is_permanent=self._is_permanent(error),
            )

    def _connect(self, gcs: str) -> None:
        """Prepare this process to start workers: through Ray, or as processes that this process starts itself."""
        cluster.limit_nodes_to(patiently(self._store, lambda: job_queue.kept_nodes(self._store, self._job)))
        if gcs != NO_GCS:
            runtime_env = shipped_code.runtime_env(self._spec.run_config, self._job.pool, gcs)
            if remote_files.has_frames(self._spec):
                runtime_env = remote_files.for_workers(runtime_env, self._key.submission_id)
            if self._starts_workers(gcs):
                use_nodes(partial(leaving_nodes.find, self._store, self._job.pool, gcs))
            else:
                use_template(None)
            connect(gcs, runtime_env)
            # `ray.init` has replaced the driver's SIGTERM handler, so the handler is set again.
            signal.signal(signal.SIGTERM, self._on_sigterm)
        else:
            cluster.use_register(NodeRegister(NodeRegister.path_in(Path(os.environ["TMPDIR"]))))
        self._leaving.start()

    def _starts_workers(self, gcs: str) -> bool:
        """Return whether this process starts the workers of the job itself on a pool with Ray: they need no Ray, and
        all nodes are on this machine."""
        if not self._spec.forks_workers or self._spec.demand().needs_ray or not is_on_loopback(gcs):
            return False
        return bool(leaving_nodes.find(self._store, self._job.pool, gcs))

    def _node_seconds(self) -> float | None:
        """Return the node-seconds of the attempt so far: the number of nodes that it uses, multiplied by the
        seconds."""
        found = patiently(self._store, lambda: attempts.node_seconds(self._store, [self._key], time.time()))
        return found.get(self._key)

    def _is_permanent(self, error: BaseException) -> bool:
        """Return whether a further attempt would fail with the same error."""
        if not isinstance(error, ShoalError) or not error.permanent:
            return False
        if not isinstance(error, CapacityError) or isinstance(error, UnusableGpuError):
            return True
        return not self._could_fit()

    def _could_fit(self) -> bool:
        """Return whether the workers would fit on the pool if the pool had its largest number of nodes.

        The present number of nodes is not used, because a node may have been lost just now, or the pool may grow.
        """
        try:
            status = ComputePool(self._job.pool, store=self._store, is_named=False).describe()
        except ShoalError as unknown:
            print(f"the largest size of the pool is not known: {unknown}", flush=True)
            return True
        spec = PoolSpec.parse(status.uri)
        # The nodes count their own GPUs. So the number of GPUs per node is not known if no node is active.
        if spec.gpus_per_node == ALL and not status.active:
            return True
        # The nodes of an existing Ray cluster may be larger than the nodes that the pool's spec describes.
        cpus = max([spec.cpus_per_node, *(node.cpus for node in status.active)])
        gpus = max([spec.gpus_per_node, *(node.gpus for node in status.active)])
        return self._spec.demand().could_fit(NodeSize(cpus, gpus), status.max_nodes)

    def _expiry_hint(self, cause: str) -> str:
        """Return a sentence that warns of expired credentials if they may be the cause of an error; otherwise an empty
        text."""
        if not self._secrets.given or self._job.queued_at is None or self._job.admitted_at is None:
            return ""
        return credentials.expiry_hint(cause, self._job.admitted_at - self._job.queued_at)

    def _store_end(self, end: End) -> bool:
        """Write the final state, the result and the error of the attempt into its row in the store.

        Credentials are removed from the error first, and a long error is shortened.
        """
        error = None if end.error is None else _shortened(self._secrets.redact(end.error))
        result = None if end.result is None else end.result.document()
        if error is not None:
            print(f"{end.state.value}: {error}", flush=True)

        def write() -> bool:
            batch = self._metrics.prepare()
            if attempts.end(
                self._store,
                self._key,
                end.state,
                time.time(),
                seen={JobState.RUNNING},
                error=error,
                error_is_permanent=end.error_is_permanent,
                result=result,
                results_digest=end.results_digest,
                progress=self._heartbeats.progress,
                within=partial(self._metrics.write, batch),
            ):
                return True
            # The row already contains a final state. If it is the same state that this call wants to write, an earlier
            # call of `write` has stored it, and only the database's reply was lost. Then this call was successful.
            job = attempts.load(self._store, self._key)
            # The values in the row and the values to write are compared as text, because NaN is not equal to NaN.
            return dump_json([job.state, job.error, job.result]) == dump_json([end.state, error, result])

        try:
            stored = patiently(self._store, write)
        except ShoalError as refused:
            print(f"the end of the job could not be stored: {refused}", flush=True)
            return False
        if not stored and result is not None:
            print("the result is not recorded, because another process has already recorded the job's end", flush=True)
        return stored

    def _work(self, run: Run | None) -> tuple[JobResult, str | None]:
        environment, keep = self._worker_environment(run), self._heartbeats.keep
        place = AttemptContext(
            self._store,
            self._key,
            run,
            self._tags(),
            environment,
            keep,
            self._metrics,
            self._free_room,
            self._stopwatch,
        )
        spec = table_versions.pinned(self._spec, self._job.versions, self._keep_versions)
        spec = staged_rows.staged(spec, self._key, self._secrets)
        spec = table_versions.divided(spec, self._keep_versions)
        table_versions.check_expectations(spec, self._job.created_at, self._keep_versions)
        return driver_of(spec).work(place)

    def _keep_versions(self, found: dict[str, Any]) -> dict[str, Any]:
        return patiently(self._store, lambda: attempts.keep_choice(self._store, self._key, "versions", found))

    def _free_room(self) -> None:
        """End the workers and start the next waiting job, before this driver saves, logs and registers the model."""
        from shoal.training.gang.gang import end_gangs

        with only_printed("the room of the job's workers could not be freed before the end of the job"):
            used = job_nodes()
            end_gangs()
            job_queue.free_gang(self._store, self._key, time.time(), used)
            rounds.start_next(self._store, self._job.pool)
        mlflow_run.retry_briefly(self._spec.run_config.env)
        # Ray's compiled code may have caught `_StopRequested` and only printed an error, so the exception is raised
        # again here.
        if self._told_to_end:
            raise _StopRequested

    def _begin_run(self) -> None:
        if self._spec.tracking is None:
            return
        if not mlflow_run.available():
            if self._spec.tracking.uri or self._spec.register_as:
                raise MissingExtraError("mlflow", "mlflow")
            print("MLflow is not installed on the pool, so the job records nothing in MLflow", flush=True)
            return
        with before_work(mlflow_run.uri_of_job(self._spec.tracking.uri), self._spec.run_config.env):
            self._run = Run.begin(self._spec.tracking, name=self._key.submission_id, tags=self._tags())
            attempts.note_run(self._store, self._key, self._run.run_id)
            self._metrics.feed = MlflowFeed(self._run)
            print(f"MLflow run: {self._run.link}", flush=True)
            with only_printed("the MLflow run of the previous attempt could not be ended"):
                self._end_previous_run(self._run)

    def _end_previous_run(self, run: Run) -> None:
        """End the MLflow run of the previous attempt, whose driver may have been killed before it ended the run.

        The process that found the killed driver cannot end the run, because only drivers have MLflow and its
        credentials.
        """
        previous = self._store.get(Job, (self._key.job_id, self._key.attempt - 1))
        if previous is not None and previous.mlflow_run_id:
            points = metric_points.of_attempt(self._store, Key(self._key.job_id, previous.attempt))
            run.end_other(previous.mlflow_run_id, _RUN_STATUS[previous.state], points[previous.metrics_in_mlflow :])

    def _tags(self) -> dict[str, str]:
        return {
            JOB_TAG: self._key.job_id,
            ATTEMPT_TAG: str(self._key.attempt),
            "shoal.pool": self._job.pool,
            HOLDER_TAG: self._job.holder,
        }

    def _worker_environment(self, run: Run | None) -> dict[str, str]:
        """Return the workers' environment variables: those of the spec, and those for credentials, working folder and
        MLflow run."""
        environment = {**self._secrets.variables(), **self._spec.run_config.env}
        if self._secrets.values:
            environment[SECRETS] = json.dumps(sorted(self._secrets.values))
        environment["PWD"] = storage.of_attempt(self._store, self._job, self._key.submission_id)
        if run:
            environment |= {
                "MLFLOW_TRACKING_URI": run.uri,
                "MLFLOW_EXPERIMENT_ID": run.experiment_id,
                "MLFLOW_RUN_ID": run.run_id,
            }
            if artifacts := mlflow_run.artifacts_of(run.uri):
                environment[ARTIFACTS] = artifacts
        return environment

    def _on_sigterm(self, *_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the recording of the end
        self._told_to_end = True
        raise _StopRequested


def connect(gcs: str, runtime_env: dict[str, Any]) -> None:
    """Connect this process to the Ray cluster of its pool.

    The value of RAY_ADDRESS that Ray sets for a job is not used. If two clusters run on one host, Ray sometimes sets
    the address of the wrong cluster (seen with Ray 2.60).
    """
    os.environ["RAY_ADDRESS"] = gcs
    if _JOB_CONFIG in os.environ:
        os.environ[_JOB_CONFIG] = _without_package(os.environ[_JOB_CONFIG])
    # The handler of Ray waits for half a second, and the cluster notices the end of this process without it.
    atexit.unregister(ray.shutdown)
    from shoal.pool.backends.local.raylet import shorten_messages_of_raylets

    shorten_messages_of_raylets()
    # Ray's workers import first from the folder in which `ray.init` is called: only root can write to /.
    with contextlib.chdir("/"):
        ray.init(address=gcs, logging_level=logging.WARNING, runtime_env=runtime_env or None)


def _without_package(config: str) -> str:
    """Remove the job's package (`working_dir`) from Ray's configuration of the job, so that the nodes of the workers do
    not unpack the package."""
    found = json.loads(config)
    (found.get("runtime_env") or {}).pop("working_dir", None)
    return json.dumps(found)


def _shortened(error: str) -> str:
    """Leave out the middle of an error that is too long to be stored."""
    left_out = len(error) - _MOST_CHARACTERS
    if left_out <= 0:
        return error
    half = _MOST_CHARACTERS // 2
    return f"{error[:half]} [... {left_out:,} characters left out ...] {error[-half:]}"


def _cause(error: BaseException) -> str:
    if isinstance(error, Exception):
        return str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: {error}, raised in the driver: the job's code must not end the process"


def main(*, ends_process: bool = False) -> int:
    """Run the attempt that the command-line arguments ``JOB_ID ATTEMPT`` name, and return the exit code."""
    key = Key(sys.argv[1], int(sys.argv[2]))
    secrets = Secrets()
    # The log file is created before the row's state becomes RUNNING, because from then on other processes read the
    # file.
    with teed(log_path(key), secrets.stream) as filter_by:
        store = Store(migrate=False)
        # The credentials are read while the row's state is still PENDING, because in any other state another process
        # may delete the file with the credentials.
        try:
            with act(JobStep.TAKE):
                secrets = credentials.take(key.submission_id)
            secrets = receive(store, key) or secrets
        except AttemptTakenError as error:
            print(f"nothing to do for attempt {key.attempt} of job {key.job_id}: {error}", flush=True)
            return 0
        except JobError as error:
            print(f"failed: {error}", flush=True)
            attempts.end(store, key, JobState.FAILED, time.time(), seen={JobState.PENDING}, error=str(error))
            return 1
        filter_by(secrets.stream)
        with hiding(secrets.known.hide), hidden_output(secrets.values):
            code = _start(store, key, secrets)
            if ends_process:
                own_process.end_within(DRIVER_END_S, code, write_rest)
            return code


def _start(store: Store, key: Key, secrets: Secrets) -> int:
    """Run the attempt if no other process has started or ended it, and return the exit code."""
    job = attempts.start(store, key, ProcessId.mine().to_json(), time.time())
    if job is None:
        print(f"nothing to do: attempt {key.attempt} of job {key.job_id} has ended, or another driver runs it")
        return 0
    os.environ.update(secrets.variables(hidden=(CONNECTION_PREFIX,)))
    if job.team is not None:
        os.environ[TEAM_VARIABLE] = job.team  # the job may scale its pool
    telemetry.job_queued(job.pool, job.framework, (job.admitted_at or job.created_at) - job.created_at)
    spec = parse_spec(remote_files.unpacked(credentials.reveal(job.spec, secrets.uris), os.getcwd()))
    if remote_files.has_frames(spec):
        # The frames (small DataFrames sent with the job) are in this folder, and shoal looks for them in sys.path.
        sys.path.append(os.getcwd())
    print(f"job {key.job_id}, attempt {key.attempt}, on pool {job.pool}, for {job.holder}", flush=True)
    return Driver(store, job, spec, secrets).run()


def run(template: socket.socket | None = None) -> int:
    """Prepare this process for forking workers, call :func:`main`, flush all output, and return the exit code.

    The caller ends the process with `os._exit`, because a normal exit could hang. Threads have ended and exit handlers
    have run before, as at a normal exit.

    Args:
        template: Socket to the template of the workers (see `shoal.training.gang.child`). None: fork one.
    """
    own_process.forget_exit_handlers()
    # The template process is forked before this process starts a thread, because only a process with one thread may
    # fork.
    if libraries := sys.argv[3:]:
        # The workers are forked from the template process, so all processes share the memory of these modules.
        with before_forks():
            import_lean(library_of(library).worker for library in libraries)
    if template is None and (forked := fork_template()):
        template, _ = forked
    use_template(template)
    code = main(ends_process=True)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
