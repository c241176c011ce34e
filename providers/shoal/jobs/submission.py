"""Submit jobs to the HTTP endpoint of a pool's head, reattach to jobs, and list jobs; the submitter needs no Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from shoal.errors import (
    BudgetError,
    DataAccessError,
    DataError,
    InvalidArgumentError,
    JobNotFoundError,
    ShoalError,
    StoreError,
    shown,
)
from shoal.jobs import credentials, ids
from shoal.jobs.capacity import Gang, refuse_without_ray
from shoal.jobs.credentials import Secrets
from shoal.jobs.environment import code
from shoal.jobs.files import staged_data_claims
from shoal.jobs.fingerprint import fingerprint
from shoal.jobs.handle import JobHandle, JobStatus
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.journal.tasks import TaskTry, jobs_of
from shoal.jobs.lost_attempts import address, pool_endpoint
from shoal.jobs.remote import frames, package, reachability, shared_folders
from shoal.jobs.remote.package import Package
from shoal.jobs.specs.function import AnyJobSpec, parse_spec
from shoal.pool.backends import versions
from shoal.pool.endpoint import Endpoint
from shoal.pool.holder import python_holder
from shoal.pool.names import is_pool_name
from shoal.pool.selection import which_pool
from shoal.pool.spec import PoolSpec
from shoal.redaction import redact
from shoal.state import Store
from shoal.state.codec import storable
from shoal.state.schema import JOB_ENDED, Job, JobState

MOST_LISTED = 1_000_000
"""Upper bound of `limit` in `list_jobs`; SQLite refuses integers of more than 63 bits."""


def submit(
    spec: AnyJobSpec,
    *,
    holder: str | None = None,
    key: str = "",
    task: TaskTry | None = None,
    connection_url: Callable[[str], str | None] | None = None,
    endpoint_of: Callable[[str], Endpoint] | None = None,
    clock: Callable[[], float] = time.time,
    returns_model: bool = False,
    job_id: str | None = None,
    detached: bool = False,
) -> JobHandle:
    """Submit a job to a pool, or attach to the same job if it was submitted before.

    The job starts at once if the pool has room for it; otherwise it waits in the pool's queue
    (`shoal.jobs.queue_order`).

    The call returns a handle of the existing attempt while the same job is pending or running, or if it has succeeded
    and its result has not been returned to a caller yet. In all other cases a new attempt is submitted. Plain Python
    and the CLI get a new job with every call, unless ``run_config.job_id`` is set.

    A try of a workflow engine's task (`task`) also finds the unfinished job of an earlier try if the spec has changed
    since that try, for example because a template contains the present time. The try then waits for the job of the
    earlier try.

    Args:
        spec: Spec of the job.
        holder: Name of the run that submits the job; by default a name for this process.
        key: Text that distinguishes tasks of one holder that submit the same spec, such as the id and map index of a
            task.
        task: The try of a workflow engine's task that submits the job. None: the job is found only by its spec.
        connection_url: Function that returns the SQLAlchemy URL of a database connection by its name, or None if there
            is none. It is called only for names without an environment variable ``SHOAL_CONNECTION_<NAME>``.
        endpoint_of: Finds the head of a pool; :func:`shoal.jobs.lost_attempts.pool_endpoint` by default.
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

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: The pool is not up.
        InvalidArgumentError: A job of this id is pending or running with another spec; `job_id` and
            ``run_config.job_id`` differ; or a path in `code` does not exist. For a new attempt only: a database
            connection or a secret variable is not known, the pool runs another version of Python or shoal, or its nodes
            cannot reach a file or folder that the job names.
        BudgetError: The attempts of the job have used up its budget of node-hours.
        DataError: The data that were staged for the job do not exist any more.
        JobError: The pool's head does not answer, or refused the job.
    """
    config = spec.run_config
    if job_id is not None and config.job_id not in (None, job_id):
        raise InvalidArgumentError(
            f'job_id="{job_id}" and run_config.job_id="{config.job_id}" differ: give only one of them'
        )
    orphan_after = config.orphan_after
    if detached and "orphan_after" not in config.model_fields_set:
        orphan_after = None
    holder = storable(holder or python_holder())
    store = Store()
    for dataset in spec.datasets():
        if dataset.staged_copy is not None:
            dataset.staged_copy.submitted()
    endpoint_of = endpoint_of or partial(pool_endpoint, store=store)
    pool = which_pool(store, config.pool_name)
    library = spec.framework if returns_model else None
    config = config.model_copy(update={"code": code.stored(config.code)})
    given = spec.model_copy(update={"run_config": config})
    digest = fingerprint(given.identifying(pool, os.environ))
    spec = given.completed(pool, os.environ).model_copy(update={"fingerprint": digest})
    job_id = spec.run_config.job_id or job_id or ids.job_id(spec.framework, holder, digest, key)
    if task is not None:
        secrets_of = partial(_secrets, spec, connection_url)
        found = _of_earlier_try(
            store, holder, task, digest, endpoint_of, clock, secrets_of, detach=orphan_after is None
        )
        if found is not None:
            return found
    pool_spec = reachability.spec_of(store, pool)
    is_remote = shared_folders.is_remote(pool_spec)
    along: Package | None = None
    spec = reachability.located(spec, pool_spec)
    with frames.sent_for(spec, pool_spec) as sent:
        spec = sent.spec
        document, uris = credentials.hide(spec.document())
        if is_remote:
            document, along = package.taken_along(document, sent.packaged)
        while True:
            endpoint = endpoint_of(pool)
            refusal = _refusal(store, spec, job_id, pool_spec, endpoint, library, clock())
            secrets: Secrets | None = None
            # A failed check refuses only a new attempt. The driver of an earlier attempt may still wait for its
            # credentials, so the credentials are read even if a check has failed.
            try:
                secrets = _secrets(spec, connection_url, uris)
            except InvalidArgumentError as error:
                refusal = refusal or error
            order = Order(
                job_id,
                pool,
                holder,
                document,
                address(endpoint),
                orphan_after,
                spec.run_config.priority,
                Gang.of(spec).to_json(),
                task,
                needs_credentials=is_remote and secrets is not None and secrets.given,
            )
            job = attempts.ask(store, order, clock(), refusal)
            handle = JobHandle(
                store,
                job,
                secrets=secrets,
                package=along,
                actor=holder,
                cancel_on_interrupt=ids.is_interactive(holder),
                endpoint_of=endpoint_of,
                clock=clock,
            )
            with _naming_job_that_goes_on(store, job):
                if _is_usable(handle, job, order, spec.staged()):
                    if orphan_after is None and secrets is not None:
                        # A detached job gets its credentials now. This process may end after this call, and then
                        # possibly no process has the credentials.
                        handle.deliver_credentials()
                    return handle
            # `_is_usable` has found that the attempt is lost or has failed. The next iteration creates a new attempt.


@contextmanager
def _naming_job_that_goes_on(store: Store, job: Job) -> Iterator[None]:
    """Add a note with the job's id to an error that the `with` block raises, unless the attempt has ended."""
    try:
        yield
    except BaseException as error:
        state = None
        with suppress(StoreError):
            state = attempts.state(store, Key(job.id, job.attempt))
        if state not in JOB_ENDED:
            error.add_note(
                f'job "{job.id}" was recorded before this error, and may run: shoal.jobs.attach({job.id!r}) finds it, '
                f"and `shoal jobs cancel {job.id}` ends it"
            )
        raise


def _of_earlier_try(
    store: Store,
    holder: str,
    task: TaskTry,
    digest: str,
    endpoint_of: Callable[[str], Endpoint],
    clock: Callable[[], float],
    secrets_of: Callable[[], Secrets],
    *,
    detach: bool,
) -> JobHandle | None:
    """Return a handle of the job of an earlier try of the task, if this try takes over that job; otherwise None.

    Unfinished jobs that this try does not take over are ended, so that a task never has two jobs at a time.

    Args:
        store: Store that has the rows of the jobs.
        holder: Name of the run to which the task belongs.
        task: The try of the task.
        digest: Fingerprint of the spec of this try.
        endpoint_of: Function that finds the head of a pool.
        clock: Function that returns the present time in seconds since the epoch.
        secrets_of: Function that returns the credentials of this try, which are sent to a driver that waits for them.
        detach: Whether a job that this try takes over goes on if no process polls it.

    Raises:
        JobError: A newer try of the task has an unfinished job.
    """
    found: JobHandle | None = None
    for job in jobs_of(store, holder, task):
        handle = JobHandle(store, job, actor=holder, endpoint_of=endpoint_of, clock=clock)
        is_ended = job.state in JOB_ENDED
        if not is_ended and task.is_older_than(job):
            raise task.superseded_by(job)
        if found is not None or not task.takes_over(job):
            # This try of the task does not take over the job. A result of the job is marked as returned to a caller, so
            # that no later submission gets that result.
            if is_ended:
                attempts.collect(store, Key(job.id, job.attempt), clock())
            else:
                handle.cancel(f"try {task.number} of the task does not use the job of an earlier try")
            continue
        # The job's submitter has not put the job into the queue yet. This try of the task does not take over such a
        # job, because only the submitter has the job's credentials. The job goes on if its spec is the spec of this
        # try; otherwise the job is ended.
        if job.state is JobState.PENDING and job.queued_at is None:
            why = "another try of the task submits the task's job with another spec"
            if job.spec["fingerprint"] != digest and not handle.end_pending(job, JobState.CANCELLED, why):
                handle.cancel(why)  # a driver has started the job meanwhile, so the job is running
            continue
        joined = job if is_ended else attempts.join(store, Key(job.id, job.attempt), clock(), task, detach=detach)
        if joined is None:
            # The job has ended since its row was read. If the job has succeeded, its result is in the row.
            joined = attempts.load(store, Key(job.id, job.attempt))
        if joined.state not in JOB_ENDED:
            needed = joined.state is JobState.PENDING and joined.needs_credentials
            secrets = secrets_of() if needed else None
            handle = JobHandle(store, joined, secrets=secrets, actor=holder, endpoint_of=endpoint_of, clock=clock)
            joined = handle.settle()
        if joined.state not in (JobState.FAILED, JobState.CANCELLED):
            found = handle
    return found


def _refusal(
    store: Store,
    spec: AnyJobSpec,
    job_id: str,
    pool: PoolSpec,
    endpoint: Endpoint,
    library: str | None,
    now: float,
) -> ShoalError | None:
    """Return the error with which a new attempt of a job is refused; None if a new attempt is allowed.

    Args:
        store: Store that has the rows.
        spec: Spec of the job.
        job_id: Id of the job.
        pool: Settings of the pool.
        endpoint: Head of the pool.
        library: Library with which this process loads the trained model; None if it loads none.
        now: Present time in seconds since the epoch.
    """
    try:
        versions.check(pool.name, endpoint.versions, library)
        reachability.check(spec, pool)
        refuse_without_ray(spec, pool)
        reachability.check_nodes(store, pool)
        attempts.check_budget(store, job_id, spec.run_config.budget_node_hours, now)
    except (InvalidArgumentError, BudgetError) as error:
        return error
    return None


def _secrets(
    spec: AnyJobSpec, connection_url: Callable[[str], str | None] | None, uris: Mapping[str, str] | None = None
) -> Secrets:
    """Return the credentials for the driver of a job.

    Args:
        spec: Spec of the job.
        connection_url: Function that returns the URL of a database connection by its name.
        uris: The spec's URIs with credentials, by JSON pointer. None: this function searches the spec for them.

    Raises:
        InvalidArgumentError: A database connection or a secret variable is not known.
    """
    if uris is None:
        uris = credentials.hide(spec.document())[1]
    hidden = credentials.secrets_of(spec.run_config.secret_env, os.environ)
    named = [dataset.connection for dataset in spec.datasets() if dataset.connection]
    databases = credentials.connections(named, os.environ, connection_url)
    return Secrets({**credentials.from_environment(os.environ), **databases, **hidden}, uris, frozenset(hidden))


def _claim(handle: JobHandle, job: Job, locations: Collection[str]) -> None:
    """Record in directories of staged data that the attempt uses the data. If this fails, record the attempt as failed.

    Raises:
        DataError: The staged data do not exist any more, or their directory cannot be written to.
    """
    try:
        staged_data_claims.claim(Key(job.id, job.attempt), locations)
    except Exception as error:  # Different storages raise different exceptions, so all types are caught.
        why = str(error) if isinstance(error, DataError) else f"the staged data cannot be used: {redact(str(error))}"
        # If another process has started the attempt meanwhile, the attempt goes on, and nothing is raised.
        if handle.end_pending(job, JobState.FAILED, why):
            raise (type(error) if isinstance(error, DataError) else DataAccessError)(why) from error


def _is_usable(handle: JobHandle, job: Job, order: Order, staged: Collection[str]) -> bool:
    """Submit or queue the attempt if no process has done so yet, and return whether it is usable.

    An attempt that has failed or was cancelled is not usable, and a new attempt is needed.

    Args:
        handle: Handle of the attempt.
        job: The attempt's row.
        order: The caller's order.
        staged: Directories of the data that were staged for the caller.

    Returns:
        False if the attempt has failed or was cancelled; otherwise True.

    Raises:
        DataError: The staged data do not exist any more, or their directory cannot be written to.
    """
    if job.state in JOB_ENDED:
        return True  # `attempts.ask` returns an ended attempt only if its result has not been returned to a caller yet
    if job.state is JobState.PENDING:
        # If the attempt belongs to an earlier submission, it uses that submission's staged data. The data that were
        # staged for this call are then not claimed.
        _claim(handle, job, parse_spec(job.spec).staged().intersection(staged))
        if job.endpoint == order.endpoint and handle.send():
            return True
    return handle.settle().state not in (JobState.FAILED, JobState.CANCELLED)


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
        raise JobNotFoundError(f"job {shown(job_id)} does not exist: `shoal jobs list` shows all jobs")
    store = store or Store()
    job = attempts.latest(store, job_id) if attempt is None else attempts.load(store, Key(job_id, attempt))
    return JobHandle(store, job, submissions=submissions, actor=actor)


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
        raise InvalidArgumentError(f"limit={shown(limit)} is not legal: use a whole number from 1 to {MOST_LISTED}")
    # An illegal name is not looked up, because databases refuse some texts, such as texts with a NUL character.
    if pool_name is not None and not is_pool_name(pool_name):
        return []
    store = Store()
    found = attempts.newest(store, pool=pool_name, states=states, limit=limit)
    places = job_queue.places(store) if any(job.is_waiting for job in found) else {}
    keys = [Key(job.id, job.attempt) for job in found]
    used = attempts.node_seconds(store, keys, time.time())
    return [JobStatus.of(job, places.get(key), used.get(key)) for job, key in zip(found, keys, strict=True)]
