"""Calls of estimators, distributors, decorated functions, `predict`, `search` and `shoal.many`, of any kind of job.

If this process is connected to a Ray cluster, a call runs there. Otherwise the call runs as a job on a pool. If no pool
is named and none is up, the call uses an embedded pool with one node. If the call waits for the job, the embedded pool
belongs to this process and ends with it. If the call does not wait, the embedded pool belongs to the job and ends with
the job.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from threading import Thread
from typing import Any, Generic, ParamSpec, TypeVar, cast

from shoal import jobs
from shoal.distributors.call_pool import pool_for_job
from shoal.errors import InvalidArgumentError
from shoal.jobs import credentials, ids, mlflow_run
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.kind import KindCall, call_of
from shoal.pool.selection import pool_without_folder
from shoal.secrets.hidden_output import SECRETS
from shoal.secrets.known_secrets import KnownSecrets
from shoal.secrets.redaction import hiding, redact_value
from shoal.state import Store
from shoal.training.cluster import is_connected
from shoal.training.locations import Claim, resolved
from shoal.training.pytorch.program import Program
from shoal.training.reporting import OnProgress, ProgressDisplay, say
from shoal.training.run_config import RunConfig

T = TypeVar("T")

PoolOf = Callable[[str | None], AbstractContextManager[str]]
"""Type of a function that finds or starts the pool of a call, and returns a context manager that yields the pool's
name. The argument is the id of a job: an embedded pool, or leased nodes, then last until this job ends. If the argument
is None, the pool or the nodes last until the ``with`` block ends."""

_NO_JOB = (
    "submit needs a job on a pool, but this process is connected to a Ray cluster, where calls do not run as jobs: "
    "call fit, run, distributed or predict instead (in a thread, if this process has other work to do), or submit from "
    "a process that is not connected"
)


@dataclass(frozen=True)
class Call(Generic[T]):
    """A call of any kind.

    Args:
        parts: What the kind of the call does, with the spec of the job.
        value: Function that returns the value of the call from what the engine has returned; None: as the kind says.
        pool: Function that finds the pool, and starts an embedded pool if necessary; None: as for any job.
    """

    parts: KindCall[Any, Any, Any]
    value: Callable[[Any], T] | None = None
    pool: PoolOf | None = None

    def run(self) -> T:
        """Run the call, print the log of a job in this process, and return the value of the call.

        Raises:
            JobFailedError: The job failed. The message ends with the cause.
        """
        if is_connected():
            config = self.parts.spec.run_config
            if any(dataset.expect for dataset in self.parts.spec.datasets()):
                raise InvalidArgumentError(
                    "a dataset has the option expect, which only a job checks, but this process is connected to a Ray "
                    "cluster, where calls do not run as jobs: remove expect, and call DataConnector.expect before"
                )
            env = worker_environment(config)
            name = config.job_id or f"{self.parts.spec.framework}-{secrets.token_hex(6)}"
            # The values of `secret_env` are hidden in the errors of the run.
            with hiding(KnownSecrets(os.environ.get(each, "") for each in config.secret_env).hide):
                return self._valued(self.parts.run_here(env, Claim(name, f"python:{os.getuid()}")))

        returns_model = self.parts.returns_model
        self.parts.check()
        with self._pool(None) as pool_name:
            call = SubmittedCall(jobs.submit(self._spec(pool_name), returns_model=returns_model), self._read)
            if returns_model:
                # The model's library is imported while the job runs, and not before it is submitted: the import takes
                # 1.6 s of CPU time, and holds the GIL.
                Thread(target=self._import_library).start()
            try:
                # Without a terminal, `ProgressDisplay` would print the progress as lines. The job's log already
                # contains lines about the progress, so `first_line_s=math.inf` turns the display's own lines off.
                with ProgressDisplay(first_line_s=math.inf) as display:
                    return call.result(on_log=say, on_progress=display.show)
            except KeyboardInterrupt:
                # `result` cancels the job on Ctrl-C. But Ctrl-C may have been pressed before `result` began, so the job
                # is cancelled here as well. Cancelling a job twice does no harm.
                call.cancel("the process that waited for the job was interrupted")
                raise

    def submit(self) -> SubmittedCall[T]:
        """Submit the call as a job, and return without waiting for the job.

        The job goes on without a process that polls it, unless the caller has set `orphan_after`.

        Raises:
            InvalidArgumentError: This process is connected to a Ray cluster.
        """
        check_submit()

        self.parts.check()
        spec, returns_model = self.parts.spec, self.parts.returns_model
        given = spec.run_config.job_id
        job_id = ids.new_job_id(spec.framework) if given is None else ids.checked(given)
        with self._pool(job_id) as pool_name:
            job = jobs.submit(self._spec(pool_name), returns_model=returns_model, job_id=job_id, detached=True)
        job.outlive_interrupts()
        # The copies of DataFrames that the spec holds are removed when the job has ended, even if the handle is kept.
        read = replace(self, parts=call_of(spec.with_datasets(lambda each: each.model_copy().holding(None))), pool=None)
        return SubmittedCall(job, read._read)

    def _pool(self, job_id: str | None) -> AbstractContextManager[str]:
        if self.pool is not None:
            return self.pool(job_id)
        return pool_for_job(self.parts.spec, job_id, may_call_ray=self.parts.may_call_ray)

    def _spec(self, pool_name: str) -> jobs.AnyJobSpec:
        """Store the code, and return the spec of the job on a pool."""
        spec: jobs.AnyJobSpec = self.parts.spec
        changed = self.parts.stored()
        if self.parts.tracks_like_caller and "tracking" not in spec.model_fields_set and spec.register_as is None:
            changed["tracking"] = mlflow_run.tracking_of_training(os.environ)
        return spec.model_copy(update=changed).on_pool(pool_name)

    def _read(self, result: jobs.JobResult) -> T:
        return self._valued(self.parts.read(result, self.parts.spec.run_config.artifact_location))

    def _valued(self, answer: Any) -> T:
        return cast(T, (self.value or self.parts.value)(answer))

    def _import_library(self) -> None:
        # If the library is missing, reading the model raises an error later.
        with suppress(ImportError):
            importlib.import_module(self.parts.spec.framework)


def run_call(prepared: Callable[[ExitStack], Call[T]]) -> T:
    """Run a call, and return its value.

    Args:
        prepared: Function that returns the call. DataFrames are copied to files for this call only: the function adds
            the removal of the copies to the `ExitStack`.
    """
    with ExitStack() as staged:
        return prepared(staged).run()


def submitted(prepared: Callable[[ExitStack], Call[T]]) -> SubmittedCall[T]:
    """Submit a call, and return without waiting for its job.

    Args:
        prepared: Function that returns the call. It adds the removal of copies of DataFrames to the `ExitStack`: they
            are removed if the submission fails, and otherwise kept for the job.

    Raises:
        InvalidArgumentError: This process is connected to a Ray cluster.
    """
    check_submit()
    with ExitStack() as staged:
        call = prepared(staged).submit()
        staged.pop_all()
    return call


def check_submit() -> None:
    """Check that this process is not connected to a Ray cluster. The calls of a connected process run in the cluster,
    not as jobs, so they cannot be submitted.

    Raises:
        InvalidArgumentError: This process is connected to a Ray cluster.
    """
    if is_connected():
        raise InvalidArgumentError(_NO_JOB)


def packed(program: Program, config: RunConfig) -> bytes:
    """Pickle a program for the pool on which it will run.

    Raises:
        InvalidArgumentError: The program cannot be pickled, or is too large; or the folder of a script is too large to
            travel to the machines of the pool.
    """
    if is_connected():
        return program.dumps()

    return program.dumps(lambda folder: pool_without_folder(folder, config.pool_name))


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment variables for the workers that this process starts in the connected Ray cluster.

    Raises:
        InvalidArgumentError: The run has packages or code, which only a job can bring to its workers; or the variable
            of a secret is not set.
    """
    if config.packages or config.code:
        raise InvalidArgumentError(
            "run_config.packages and run_config.code need a job, but this process is connected to a Ray cluster, where "
            "calls do not run as jobs: pass packages and code to ray.init(runtime_env=...), or disconnect with "
            "ray.shutdown(), so that the call runs as a job on a pool"
        )

    hidden = credentials.secrets_of(config.secret_env, os.environ)
    return {**config.env, **hidden, **({SECRETS: json.dumps(sorted(hidden.values()))} if hidden else {})}


class SubmittedCall(Generic[T]):
    """Handle of a call that runs as a job. The method `submit` of an estimator, a distributor or a decorated function
    returns such a handle.

    The job goes on when this process ends. Any process can get another handle of the call with
    ``shoal.distributors.attach(call.job_id)``.

    In an event loop, ``await call`` returns the same as :meth:`result`, and other tasks go on meanwhile. If the task
    that awaits the call is cancelled, the job goes on.

    Args:
        job: Handle of the job.
        read: Function that reads the value of the call from the result of the job.

    Attributes:
        job: Handle of the job.
    """

    def __init__(self, job: jobs.JobHandle, read: Callable[[jobs.JobResult], T]) -> None:
        self.job = job
        self._read = read

    def __repr__(self) -> str:
        return f"SubmittedCall({self.job_id!r})"

    @property
    def job_id(self) -> str:
        """Return the id of the job."""
        return self.job.job_id

    def result(
        self,
        timeout: float | None = None,
        *,
        on_log: Callable[[str], Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> T:
        """Wait until the call has ended, and return its value, such as the booster of an estimator. Ctrl-C ends the
        wait, but the job goes on.

        A call without `submit`, such as `fit` or `run`, returns the same value.

        Args:
            timeout: Seconds to wait; the job goes on after that time. None: wait without a limit.
            on_log: Function that is called with each line of the job's log, such as `print`. None: the log is not read.
            on_progress: Function that is called with the training's progress each time the progress has changed.

        Raises:
            JobFailedError: The job failed; the message ends with the cause.
            JobCancelledError: The job was cancelled.
            JobTimeoutError: The call has not ended within `timeout` seconds. The error is also a `TimeoutError`.
            FileNotFoundError: The files of the result are gone, or cannot be reached from this machine.
        """
        return self._read(self.job.wait(timeout, on_log, on_progress))

    def status(self) -> jobs.JobStatus:
        """Return the present status of the job."""
        return self.job.status()

    def cancel(self, reason: str = "cancelled on request") -> bool:
        """Cancel the job and end its workers; return False if the job had ended already.

        Args:
            reason: Reason of the cancellation, which is stored as the job's error.
        """
        return self.job.cancel(reason)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Return the lines of the job's log.

        Args:
            follow: Whether to wait for further lines until the job has ended, instead of returning only the present
                lines.
        """
        return self.job.logs(follow=follow)

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        import asyncio

        return await asyncio.to_thread(self._read, await self.job)


def attach(job_id: str, *, artifact_location: str | None = None) -> SubmittedCall[Any]:
    """Return the handle of a call that was submitted before, by this process or another process.

    The handle's :meth:`~SubmittedCall.result` returns the same value as that of the handle from `submit`: the booster
    of an estimator, the `Response` of a `PyTorchDistributor`, the value of a decorated function or a
    `TorchDistributor`, the `PredictResult` of a prediction, or the `PartitionResults` of
    `shoal.many`. For a job that was submitted in another way, the kind of the job's spec determines the value.

    Args:
        job_id: Id of the job.
        artifact_location: The job's `artifact_location`. Needed only if the location contains credentials, because the
            store keeps no credentials.

    Raises:
        JobNotFoundError: There is no such job.
        InvalidArgumentError: `artifact_location` is not that of the job, apart from its credentials.

    Example:
        >>> from shoal.distributors import attach
        >>> attach("xgboost-2f1c9a64b0de").status().state
        'running'
    """
    job = jobs.attach(job_id)
    spec = jobs.parse_spec(attempts.load(Store(), Key(job.job_id, job.attempt)).spec)
    location = _location(spec.run_config.artifact_location, job.job_id, artifact_location)
    parts = call_of(spec)

    def read(result: jobs.JobResult) -> Any:
        try:
            return parts.value(parts.read(result, location))
        except Exception as error:
            if artifact_location is None and location is not None and "://" in location:
                error.add_note(
                    f"The store keeps no credentials: if the artifact_location of job {job_id} contains credentials, "
                    f'pass this location to attach("{job_id}", artifact_location=...)'
                )
            raise

    return SubmittedCall(job, read)


def _location(stored: str | None, job_id: str, given: str | None) -> str | None:
    """Return a job's `artifact_location`: the location that the user has given, else the location in the store."""
    if given is None:
        return stored
    location = resolved(given)
    if stored is None or redact_value(location).rstrip("/") != stored.rstrip("/"):
        raise InvalidArgumentError(
            f"artifact_location={redact_value(location)!r} is not the location of job {job_id}, whose files are in "
            f"{stored or '$SHOAL_HOME/jobs'}: give the location with which the job was submitted"
        )
    return location


P = ParamSpec("P")


def same_arguments(model: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Return a decorator for a function that takes the arguments of `model`, and gets each by its name."""
    expected = inspect.signature(model)

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given = expected.bind(*args, **kwargs)
            given.apply_defaults()
            return function(**given.arguments)

        returned = inspect.signature(function).return_annotation
        call.__signature__ = expected.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate


def submitting(run: Callable[P, T], prepared: Callable[..., Call[T]]) -> Callable[P, SubmittedCall[T]]:
    """Return the function ``submit_NAME`` for a function that runs a call: it takes the same arguments, submits the
    call as a job, and returns without waiting.

    Args:
        run: Function that runs the call.
        prepared: Function of an `ExitStack` and the arguments of `run` that returns the call; see :func:`submitted`.
    """
    name = run.__name__

    def submit(**arguments: Any) -> SubmittedCall[T]:
        return submitted(partial(prepared, **arguments))

    submit.__name__ = submit.__qualname__ = f"submit_{name}"
    submit.__module__ = run.__module__
    submit.__annotations__["return"] = f"SubmittedCall[{run.__annotations__['return']}]"
    submit.__doc__ = f"""Submit a call of `{name}` as a job, and return without waiting for the job.

    The job goes on when this process ends. The arguments are those of `{name}`.

    Returns:
        Handle of the call, whose ``result()`` returns the same as `{name}`.

    Raises:
        InvalidArgumentError: An argument is invalid, or this process is connected to a Ray cluster, where calls do not
            run as jobs.
        DataError: The dataset cannot be used.
    """
    return same_arguments(run)(submit)
