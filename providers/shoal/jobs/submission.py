"""Submitting jobs and finding them again; needs no Ray, only the pool's HTTP endpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import partial

from shoal.errors import InvalidArgumentError, JobNotFoundError, shown
from shoal.jobs import credentials, ids
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import staging
from shoal.jobs.function_spec import FunctionJobSpec, parse_spec
from shoal.jobs.handle import JobHandle, JobStatus
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.liveness import address, pool_endpoint
from shoal.jobs.spec import JobSpec
from shoal.pool.endpoint import Endpoint
from shoal.pool.holder import python_holder
from shoal.pool.resolve import which_pool
from shoal.pool.spec import is_pool_name
from shoal.state import Store
from shoal.state.codec import storable
from shoal.state.schema import JOB_ENDED, Job, JobState

_MOST_LISTED = 1_000_000
"""Attempts that one call of `list_jobs` returns; SQLite takes no limit of more than 63 bits."""


def submit(
    spec: JobSpec | FunctionJobSpec,
    *,
    holder: str | None = None,
    key: str = "",
    endpoint_of: Callable[[str], Endpoint] | None = None,
    clock: Callable[[], float] = time.time,
) -> JobHandle:
    """Have a training run on a pool, or find the run that does it already.

    Asking again for a job that is pending or running attaches to it; one that has succeeded and whose result nobody has
    collected is returned; otherwise a new attempt is made. Plain Python and the CLI mean a new job each time, unless
    ``run_config.job_id`` says which.

    Args:
        spec: What to train.
        holder: Who asks, by default this process.
        key: Tells apart the tasks of one holder that ask for the same (a task's id and map index).
        endpoint_of: Finds the head of a pool; :func:`shoal.jobs.liveness.pool_endpoint` by default.
        clock: Seconds since the epoch.

    Raises:
        PoolNotFoundError: There is no such pool.
        PoolDownError: It is not up.
        InvalidArgumentError: A job of this id runs with another spec.
        JobError: The pool's head does not answer or refused.
    """
    holder = storable(holder or python_holder())
    store = Store()
    endpoint_of = endpoint_of or partial(pool_endpoint, store=store)
    pool = which_pool(store, spec.run_config.pool_name)
    spec = spec.completed(pool, os.environ)
    spec = spec.model_copy(update={"fingerprint": staging.fingerprint(spec)})
    document, uris = credentials.hide(spec.document())
    secrets = Secrets(credentials.from_environment(os.environ), uris)
    job_id = spec.run_config.job_id or ids.job_id(spec.framework, holder, str(spec.fingerprint), key)
    while True:
        endpoint = endpoint_of(pool)
        order = Order(job_id, pool, holder, document, address(endpoint), spec.run_config.orphan_after)
        job = attempts.ask(store, order, clock())
        handle = JobHandle(
            store,
            job,
            secrets=secrets,
            cancel_on_interrupt=ids.is_interactive(holder),
            endpoint_of=endpoint_of,
            clock=clock,
        )
        if _answers(handle, job, order):
            # Where it had been asked for before, its own copy of the data is the one that it trains on.
            staging.discard(spec.staged() - parse_spec(job.spec).staged())
            return handle
        # It was lost without recording an end: the next round makes a new attempt.


def _answers(handle: JobHandle, job: Job, order: Order) -> bool:
    """Whether an attempt is, or will be, the answer to an order; submits it where that is still to do."""
    if job.state in JOB_ENDED:
        return True  # its result waits to be collected
    if job.state is JobState.PENDING and job.endpoint == order.endpoint and handle.send():
        return True
    return handle.settle().state not in (JobState.FAILED, JobState.CANCELLED)


def attach(job_id: str, attempt: int | None = None) -> JobHandle:
    """Find a job again, from any process.

    Args:
        job_id: The job.
        attempt: Which attempt of it; None: the newest.

    Raises:
        JobError: There is no such job, or no such attempt.
    """
    if not ids.is_legal(job_id):  # some texts no database takes
        raise JobNotFoundError(f"job {shown(job_id)} does not exist: `shoal jobs list` shows those that do")
    store = Store()
    job = attempts.latest(store, job_id) if attempt is None else attempts.load(store, Key(job_id, attempt))
    return JobHandle(store, job)


def cancel(job_id: str) -> bool:
    """End a job; False when it had ended already.

    Raises:
        JobError: There is no such job.
    """
    return attach(job_id).cancel()


def list_jobs(pool_name: str | None = None, *, states: Collection[JobState] = (), limit: int = 100) -> list[JobStatus]:
    """Attempts, the newest first.

    Args:
        pool_name: Of this pool only.
        states: In one of these states only.
        limit: At most so many, 1 to 1,000,000.

    Raises:
        InvalidArgumentError: A limit out of range.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MOST_LISTED:
        raise InvalidArgumentError(f"limit={shown(limit)}: it has to be a whole number, 1 to {_MOST_LISTED}")
    if pool_name is not None and not is_pool_name(pool_name):  # some texts no database takes
        return []
    return [JobStatus.of(job) for job in attempts.newest(Store(), pool=pool_name, states=states, limit=limit)]
