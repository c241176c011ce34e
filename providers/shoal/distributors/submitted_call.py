"""Provide `SubmittedCall`, the handle of a call that runs as a job, and `attach`, which returns such a handle in any
process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.distributors import call_values

if TYPE_CHECKING:
    from shoal.jobs import JobHandle, JobResult, JobStatus
    from shoal.training.progress import OnProgress

T = TypeVar("T")


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

    def __init__(self, job: JobHandle, read: Callable[[JobResult], T]) -> None:
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

    def status(self) -> JobStatus:
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
    `TorchDistributor`, or the `PredictResult` of a prediction. For a job that was submitted in another way, the kind of
    the job's spec determines the value.

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
    from shoal import jobs
    from shoal.jobs.journal import attempts
    from shoal.jobs.journal.attempts import Key
    from shoal.state import Store

    job = jobs.attach(job_id)
    spec = jobs.parse_spec(attempts.load(Store(), Key(job.job_id, job.attempt)).spec)
    return SubmittedCall(job, call_values.reader(spec, job.job_id, artifact_location))
