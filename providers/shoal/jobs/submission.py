"""Submit jobs to a pool, or attach to jobs that were submitted before, also by an earlier try of an engine's task.

The submitter needs no Ray: it asks the HTTP endpoint of the pool's head.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count

from shoal import errors
from shoal.data import staged_data
from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs import credentials, ids, remote_files, shipped_code
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import artifacts
from shoal.jobs.handle import JobHandle
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import End, Key, Order
from shoal.jobs.journal.owners import EngineTask, FlowTask, JobTakenError, TaskTry, jobs_of
from shoal.jobs.journal.stages import Stage, is_waiting, stage_of
from shoal.jobs.kind import parse_spec
from shoal.jobs.reconcile import acts, rounds
from shoal.jobs.reconcile.acts import Supplies
from shoal.jobs.reconcile.decide import Silence
from shoal.jobs.reconcile.look import Target, address, find_head, pool_endpoint
from shoal.jobs.results import JobResult
from shoal.jobs.scheduling import refuse_without_ray
from shoal.jobs.spec import AnyJobSpec, is_spec
from shoal.jobs.status import JobStatus
from shoal.os_processes import ProcessId
from shoal.pool.backends import versions
from shoal.pool.endpoint import Endpoint
from shoal.pool.holder import asking_team, python_holder, require_team, stored_team
from shoal.pool.journal import usage
from shoal.pool.options.base import is_pool_name
from shoal.pool.selection import is_embedded, which_pool
from shoal.pool.spec import PoolSpec
from shoal.pool.waiting import end_if_abandoned
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.databases import storable
from shoal.state.schema import JOB_ENDED, Job, JobState


def calls(call: Call, spec: AnyJobSpec) -> Iterator[Call]:
    """Yield the call with each job id that its task may use, in this order.

    Equal task runs of a flow run have the ids of the first job, of the second job, and so on. The task run uses the
    first one that no other task run of the same try uses. If the caller has chosen the job id, equal task runs share
    the job.
    """
    task, chosen = call.task, spec.run_config.job_id
    if not isinstance(task, FlowTask):
        yield call
    elif chosen is not None:
        yield replace(call, task=replace(task, run=chosen))
    else:
        for number in count(1):
            place = f"{task.digest} {number}"
            yield replace(call, job_id=ids.job_id(spec.framework, task.key, str(spec.fingerprint), place))


def taken_over(call: Call, task: EngineTask, spec: AnyJobSpec) -> JobHandle | None:
    """Return a handle of the job of an earlier try of the task, if this try takes over that job; otherwise None.

    This try takes over the newest job that is unfinished or has succeeded, unless a user wants a new one, or the
    function or the arguments have changed, or the files of the result are gone. It does not matter whether a caller
    already got the result of the job, because the engine may not have stored it. The other unfinished jobs are ended,
    so that a task never has two jobs at a time.

    Raises:
        JobError: The job belongs to another try or run of the task (`EngineTask.check`).
    """
    found: JobHandle | None = None
    for job in _jobs(call, task, spec):
        task.check(job)
        target = call.target(job)
        if found is not None or not task.takes_over(job) or not _has_files(job, spec):
            # No later submission gets the job or its result.
            if job.state not in JOB_ENDED:
                acts.cancel(target, job, "a later try of the task does not use the job")
            elif job.state is JobState.SUCCEEDED and job.collected_at is None:
                attempts.collect(target.store, target.key, target.clock())
        elif stage_of(job) is Stage.UNQUEUED:
            # Only the submitter, which has not put the job into the queue yet, has the job's credentials. So the job is
            # not taken over, and is ended unless its spec is the spec of this try.
            why = "another try of the task submits the task's job with another spec"
            is_other = job.spec["fingerprint"] != spec.fingerprint
            if is_other and not acts.record(target, job, End(JobState.CANCELLED, why)):
                acts.cancel(target, job, why)  # a driver has started the job meanwhile, so the job is running
        else:
            found = _joined(call, target, task, spec)
    return found


def _jobs(call: Call, task: EngineTask, spec: AnyJobSpec) -> list[Job]:
    """Return the rows of attempts that this and earlier tries of the task have submitted, the newest first."""
    if isinstance(task, TaskTry):
        return jobs_of(call.store, call.holder, task)
    newest = attempts.find_latest(call.store, call.job_id)
    # If the caller has chosen the job id, the job may belong to another flow run, or have another spec.
    is_equal = newest and newest.task_key == task.key and newest.spec["fingerprint"] == spec.fingerprint
    return [newest] if newest and is_equal else []


def _has_files(job: Job, spec: AnyJobSpec) -> bool:
    """Return whether the result's files still exist, if the job has succeeded."""
    return job.state is not JobState.SUCCEEDED or artifacts.exist(
        JobResult.model_validate(job.result), spec.run_config.artifact_location
    )


def _joined(call: Call, target: Target, task: EngineTask, spec: AnyJobSpec) -> JobHandle | None:
    """Attach this try to the job; return None if the job has failed or was cancelled."""
    joined = attempts.join(call.store, target.key, call.clock(), task, detach=call.orphan_after is None)
    if joined is None:
        return None
    supplies = Supplies()
    if joined.state not in JOB_ENDED:
        if joined.state is JobState.PENDING and joined.needs_credentials:
            supplies.secrets = call.secrets(spec, credentials.hide(spec.document())[1])
        joined = rounds.Waiter(target, supplies).round()
    return None if joined.state in (JobState.FAILED, JobState.CANCELLED) else JobHandle(target, joined, supplies)


@dataclass(frozen=True)
class Call:
    """Arguments of a call of `submit`, or their defaults.

    Attributes:
        library: Library with which this process loads the trained model; None if it loads none.
        needs_lease: Whether the holder must still have its lease on the pool, if it has had one.
        team: Team for which the caller acts.
    """

    store: Store
    holder: str
    task: EngineTask | None
    pool: PoolSpec
    job_id: str
    orphan_after: float | None
    library: str | None
    needs_lease: bool
    connection_url: Callable[[str], str | None] | None
    secret_of: Callable[[str], str | None] | None
    environment: Mapping[str, str]
    endpoint_of: Callable[[str], Endpoint] | None
    clock: Callable[[], float]
    team: str | None = None

    def target(self, job: Job) -> Target:
        """Return an attempt as a target for rounds of reconciling. It may run on another pool than the call's."""
        key = Key(job.id, job.attempt)
        return Target(self.store, key, job.pool, actor=self.holder, find_endpoint=self.endpoint_of, clock=self.clock)

    def secrets(self, spec: AnyJobSpec, uris: Mapping[str, str]) -> Secrets:
        """Return the credentials for the driver of a job.

        Args:
            spec: Spec of the job.
            uris: URIs with credentials in the spec, from `credentials.hide`.
        """
        environment = {**os.environ, **self.environment}
        hidden = credentials.secrets_of(spec.run_config.secret_env, environment, self.secret_of)
        named = [each for dataset in spec.datasets() for each in dataset.connections()]
        databases = credentials.connections(named, environment, self.connection_url)
        return Secrets({**credentials.from_environment(environment), **databases, **hidden}, uris, frozenset(hidden))


MOST_LISTED = 1_000_000
"""Upper bound of `limit` in `list_jobs`; SQLite refuses integers of more than 63 bits."""


def submit(
    spec: AnyJobSpec,
    *,
    holder: str | None = None,
    key: str = "",
    task: EngineTask | None = None,
    connection_url: Callable[[str], str | None] | None = None,
    secret_of: Callable[[str], str | None] | None = None,
    environment: Mapping[str, str] | None = None,
    endpoint_of: Callable[[str], Endpoint] | None = None,
    clock: Callable[[], float] = time.time,
    returns_model: bool = False,
    job_id: str | None = None,
    detached: bool = False,
    needs_lease: bool = False,
    team: str | None = None,
) -> JobHandle:
    """Submit a job to a pool, or attach to the same job if it was submitted before.

    The job starts at once if the pool has room for it; otherwise it waits in the pool's queue
    (`shoal.jobs.scheduling`).

    The call returns a handle of the existing attempt while the same job is pending or running, or if it has succeeded
    and its result has not been returned to a caller yet. In all other cases a new attempt is submitted. Plain Python
    and the CLI get a new job with every call, unless ``run_config.job_id`` is set.

    A try of a workflow engine's task (`task`) also finds the job of an earlier try if the spec has changed since then,
    for example because a template contains the present time. The try waits for this job, or takes its result, even if
    the result was returned before. The try submits a new job if a user has cleared the task meanwhile, or if the
    function or the arguments were changed in the workflow itself.

    Args:
        spec: Spec of the job.
        holder: Name of the run that submits the job; by default a name for this process.
        key: Text that distinguishes tasks of one holder that submit the same spec, such as the id and map index of a
            task.
        task: The try of a workflow engine's task that submits the job. None: the job is found only by its spec.
        connection_url: Function that returns the SQLAlchemy URL of a database connection, or the settings of a storage
            or catalog as JSON, by its name, or None if there is none. It is called only for names without an
            environment variable ``SHOAL_CONNECTION_<NAME>``, ``SHOAL_STORAGE_<NAME>`` or ``SHOAL_CATALOG_<NAME>``.
        secret_of: Function that returns the value of a variable in ``run_config.secret_env``, or None if there is none.
            It is called only for variables that this process does not have.
        environment: Settings of storage and MLflow for the driver, in addition to those in the environment of this
            process.
        endpoint_of: Finds the head of a pool; :func:`shoal.jobs.reconcile.look.pool_endpoint` by default.
        clock: Function that returns the present time in seconds since the epoch.
        returns_model: Whether this process loads the trained model, and so needs the same version of the model's
            library as the pool.
        job_id: Id of the job if ``run_config.job_id`` is not set. None: shoal makes an id. Unlike
            ``run_config.job_id``, this id is no part of the stored spec, so that `prune_jobs` may remove all attempts
            of the job.
        detached: Whether the job goes on if no process polls it. If the spec sets ``orphan_after``, that value counts
            instead. The stored spec does not change, so that submissions with and without `detached` are the same job.
            On a ``ray://`` pool, a detached call returns only when the job's driver has the credentials, which only
            this process can send.
        needs_lease: Whether a new attempt is refused if the holder has had a lease on the pool that has ended.
        team: Team to which the job belongs. Default: ``$SHOAL_TEAM``, else no team.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: The pool is not up.
        LeaseEndedError: `needs_lease` is set, and the holder's lease has ended.
        TeamError: The pool, or a job of this id, belongs to another team.
        InvalidArgumentError: A job of this id is pending or running with another spec; `job_id` and
            ``run_config.job_id`` differ; or a path in `code` does not exist. For a new attempt only: a database
            connection or a secret variable is not known, the pool runs another version of Python or shoal, or its nodes
            cannot reach a file or folder that the job names.
        BudgetError: The attempts of the job have used up its budget of node-hours.
        DataError: The data that were staged for the job do not exist any more.
        JobError: The pool's head does not answer, or refused the job.
    """
    if not is_spec(spec):
        raise errors.InvalidArgumentError(
            f"a job is submitted by a spec, not by an object of type {type(spec).__name__}: make a spec of a dict with "
            "shoal.jobs.parse_spec"
        )
    config = spec.run_config
    if job_id is not None and config.job_id not in (None, job_id):
        raise errors.InvalidArgumentError(
            f'job_id="{job_id}" and run_config.job_id="{config.job_id}" differ: give only one of them'
        )
    for dataset in spec.datasets():
        if dataset.staged_copy is not None:
            dataset.staged_copy.submitted()
    store, holder = Store(), storable(holder or python_holder())
    pool = which_pool(store, config.pool_name)
    is_detached = detached and "orphan_after" not in config.model_fields_set
    config = config.model_copy(update={"code": shipped_code.stored(config.code)})
    spec = spec.model_copy(update={"run_config": config})
    digest = fingerprint(spec.identifying(None if is_embedded(store, pool) else pool, os.environ))
    spec = spec.completed(pool, os.environ).model_copy(update={"fingerprint": digest})
    call = Call(
        store,
        holder,
        task,
        remote_files.spec_of(store, pool),
        ids.checked(spec.run_config.job_id or job_id or ids.job_id(spec.framework, holder, str(spec.fingerprint), key)),
        None if is_detached else config.orphan_after,
        spec.framework if returns_model else None,
        needs_lease,
        connection_url,
        secret_of,
        environment or {},
        endpoint_of,
        clock,
        asking_team(team),
    )
    require_team(call.pool.only_team, call.team, f'pool "{pool}"', is_reserved=True)
    for each in calls(call, spec):
        with suppress(JobTakenError):
            return _submitted(each, spec)
    raise AssertionError("unreachable: there is always another job id")


def _submitted(call: Call, spec: AnyJobSpec) -> JobHandle:
    """Take over the job of an earlier try of the call's task, attach to the call's job, or submit a new attempt.

    Raises:
        JobTakenError: The job belongs to another task run.
    """
    newest = attempts.find_latest(call.store, call.job_id)
    if newest is not None and newest.state not in JOB_ENDED:
        end_if_abandoned(call.store, newest.pool)
    if call.task is not None and (found := taken_over(call, call.task, spec)) is not None:
        return found
    spec = remote_files.located(spec, call.pool)
    with remote_files.sent_for(spec, call.pool) as (sent, packaged):
        # If the attempt that is found was lost or has failed, the next call creates a new one.
        while (handle := _attempt(call, sent, packaged)) is None:
            pass
        return handle


def _attempt(call: Call, spec: AnyJobSpec, packaged: Mapping[str, str]) -> JobHandle | None:
    """Find the job's unfinished attempt or create one, and send it; return None if the attempt found is of no use."""
    files = None
    document, uris = credentials.hide(spec.document())
    is_remote = remote_files.is_remote(call.pool)
    if is_remote:
        document, files = remote_files.taken_along(document, packaged)
    endpoint = call.endpoint_of(call.pool.name) if call.endpoint_of else pool_endpoint(call.pool.name, call.store)
    refusal = _refusal(call, spec, endpoint)
    secrets: Secrets | None = None
    # A failed check refuses only a new attempt. The driver of an earlier attempt may still wait for its credentials, so
    # the credentials are read even if a check has failed.
    try:
        secrets = call.secrets(spec, uris)
    except errors.InvalidArgumentError as error:
        refusal = refusal or error
    order = Order(
        call.job_id,
        call.pool.name,
        call.holder,
        document,
        address(endpoint),
        call.orphan_after,
        spec.run_config.priority,
        spec.demand().gang.to_json(),
        call.task,
        label=spec.label,
        team=stored_team(call.team),
        needs_credentials=is_remote and secrets is not None and secrets.given,
    )
    try:
        job = attempts.ask(call.store, order, call.clock(), refusal)
    except errors.JobBusyError:
        # The head is asked only if the driver has ended, because a head that does not answer would delay the refusal.
        job = attempts.latest(call.store, call.job_id)
        target = call.target(job)
        has_no_driver = job.driver is not None and ProcessId.from_json(job.driver).known_dead()
        if (has_no_driver or isinstance(find_head(target), Silence)) and rounds.host_round(target):
            return None
        raise
    target = call.target(job)
    supplies = Supplies(secrets, files, end_on_interrupt=ids.is_interactive(call.holder))
    with _naming_job_that_goes_on(target):
        if not _is_usable(target, supplies, job, order, spec.staged()):
            return None
        handle = JobHandle(target, job, supplies)
        if call.orphan_after is None and secrets is not None:
            # A detached job gets its credentials now. This process may end after this call, and then possibly no
            # process has the credentials.
            handle.deliver_credentials()
        return handle


@contextmanager
def _naming_job_that_goes_on(target: Target) -> Iterator[None]:
    """Add a note with the job's id to an error that the `with` block raises, unless the attempt has ended."""
    try:
        yield
    except BaseException as error:
        state = None
        with suppress(errors.StoreError):
            state = attempts.state(target.store, target.key)
        if state not in JOB_ENDED:
            job_id = target.key.job_id
            error.add_note(
                f'job "{job_id}" was recorded before this error, and may run: shoal.jobs.attach({job_id!r}) finds it, '
                f"and `shoal jobs cancel {job_id}` ends it"
            )
        raise


def _refusal(call: Call, spec: AnyJobSpec, endpoint: Endpoint) -> errors.ShoalError | None:
    """Return the error with which a new attempt of a job is refused; None if a new attempt is allowed."""
    try:
        versions.check(call.pool.name, endpoint.versions, call.library)
        remote_files.check(spec, call.pool)
        refuse_without_ray(spec, call.pool)
        remote_files.check_nodes(call.store, call.pool)
        attempts.check_budget(call.store, call.job_id, spec.run_config.budget_node_hours, call.clock())
        if call.needs_lease:
            with call.store.reading(snapshot=False) as session:
                usage.check_lease(session, call.pool.name, call.holder)
    except (errors.InvalidArgumentError, errors.BudgetError, errors.LeaseEndedError) as error:
        return error
    return None


def _claim(target: Target, job: Job, locations: Collection[str]) -> None:
    """Record in directories of staged data that the attempt uses them. If this fails, the attempt has failed."""
    try:
        for location in locations:
            staged_data.claim(location, target.key.submission_id)
    except Exception as error:  # Different storages raise different exceptions, so all types are caught.
        is_ours = isinstance(error, errors.DataError)
        why = str(error) if is_ours else f"the staged data cannot be used: {redact(str(error))}"
        # If another process has started the attempt meanwhile, the attempt goes on, and nothing is raised.
        if acts.record(target, job, End(JobState.FAILED, why)):
            raise (type(error) if is_ours else errors.DataAccessError)(why) from error


def _is_usable(target: Target, supplies: Supplies, job: Job, order: Order, staged: Collection[str]) -> bool:
    """Submit or queue the attempt if no process has done so yet, and return whether it is usable. An attempt that has
    failed or was cancelled is not.
    """
    if job.state in JOB_ENDED:
        return True  # `attempts.ask` returns an ended attempt only if its result has not been returned to a caller yet
    if job.state is JobState.PENDING:
        # If the attempt belongs to an earlier submission, it uses that submission's staged data. The data that were
        # staged for this call are then not claimed.
        _claim(target, job, parse_spec(job.spec).staged().intersection(staged))
        if job.endpoint == order.endpoint and acts.send(target, supplies):
            return True
    return rounds.Waiter(target, supplies).round().state not in (JobState.FAILED, JobState.CANCELLED)


def attach(
    job_id: str,
    attempt: int | None = None,
    *,
    submissions: int | None = None,
    actor: str | None = None,
    store: Store | None = None,
) -> JobHandle:
    """Return a handle of a job that this process or another process has submitted before.

    Args:
        job_id: Id of the job.
        attempt: Number of the attempt, from 1. None: the newest attempt.
        submissions: Value of `JobHandle.submissions` of the handle in another process that the new handle replaces.
        actor: Holder that is recorded if the handle cancels the job (`shoal.history`). None: this process.
        store: The state store. Default: ``$SHOAL_STATE_URL``, else SQLite in ``$SHOAL_HOME``.

    Raises:
        JobError: There is no such job, or no such attempt.
    """
    # An illegal id is not looked up, because databases refuse some texts, such as texts with a NUL character.
    if not ids.is_legal(job_id):
        raise errors.JobNotFoundError(f"job {errors.shown(job_id)} does not exist: `shoal jobs list` shows all jobs")
    store = store or Store()
    job = attempts.latest(store, job_id) if attempt is None else attempts.load(store, Key(job_id, attempt))
    return JobHandle(Target(store, Key(job.id, job.attempt), job.pool, actor=actor), job, submissions=submissions)


def cancel(job_id: str) -> bool:
    """Cancel the newest attempt of a job; return False if that attempt had ended already.

    Raises:
        JobError: There is no such job.
    """
    return attach(job_id).cancel()


def list_jobs(pool_name: str | None = None, *, states: Collection[JobState] = (), limit: int = 100) -> list[JobStatus]:
    """List attempts of jobs, the newest first.

    Args:
        pool_name: List only the jobs of this pool. None: all pools.
        states: List only attempts in these states. Empty: all states.
        limit: Greatest number of attempts to return, 1 to 1,000,000.

    Raises:
        InvalidArgumentError: `limit` is out of range.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_LISTED:
        raise errors.InvalidArgumentError(
            f"limit={errors.shown(limit)} is not legal: use a whole number from 1 to {MOST_LISTED}"
        )
    # An illegal name is not looked up, because databases refuse some texts, such as texts with a NUL character.
    if pool_name is not None and not is_pool_name(pool_name):
        return []
    store = Store()
    found = attempts.newest(store, pool=pool_name, states=states, limit=limit)
    places = job_queue.places(store) if any(is_waiting(job) for job in found) else {}
    keys = [Key(job.id, job.attempt) for job in found]
    used = attempts.node_seconds(store, keys, time.time())
    return [JobStatus.of(job, places.get(key), used.get(key)) for job, key in zip(found, keys, strict=True)]


def fingerprint(spec: AnyJobSpec) -> str:
    """Compute the digest of a spec. If a job is submitted again, the equal digest shows that it is the same job.

    The digest depends on the content of staged data, but not on their folder. A task that runs again writes its
    DataFrame into another folder, and must still find its job.

    Raises:
        DataError: Staged data do not exist any more, because a job that used them has ended and removed them.
    """
    document = spec.comparable(_by_content).document()
    # `priority` is left out, because two submissions that differ only in `priority` count as the same job.
    document["run_config"].pop("priority", None)
    # Only the names of code archives are kept, because their folders may differ between hosts. An archive's name is the
    # digest of the archive's content.
    if archives := document["run_config"].get("code"):
        document["run_config"]["code"] = [path.rsplit("/", 1)[-1] for path in archives]
    # These options are left out, because they do not change what the job computes.
    document.pop("max_failed", None)
    document.pop("memory_per_worker", None)
    for name in ("parent_run_id", "system_metrics"):
        (document.get("tracking") or {}).pop(name, None)
    (document.get("register") or {}).pop("skip_if_unchanged", None)
    return ids.digest(credentials.hide(document)[0])


def _by_content(dataset: DatasetSpec) -> DatasetSpec:
    if dataset.staging is None:
        return dataset
    from shoal.data.connector import DataConnector

    digest = DataConnector.from_spec(dataset).digest()
    return dataset.model_copy(update={"paths": (digest,), "staging": None})
