"""Run a job from a Prefect task: submit the job, copy the job's log to the run's log, and cancel the job if the run is
cancelled."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from prefect import State, Task
from prefect.logging import get_run_logger
from prefect.states import Completed

from shoal.jobs import AnyJobSpec, JobHandle, JobResult, submit, withdraw_promotion
from shoal.prefect._names import training_name
from shoal.prefect._progress import RunLog, TrainingProgress, show_page
from shoal.prefect._report import store_report
from shoal.prefect._run_holder import (
    Interrupt,
    ancestors,
    current_holder,
    in_thread,
    interrupt_of_task,
    on_interrupt,
    time_limits,
    why_ended,
)
from shoal.prefect._transactions import Enclosing
from shoal.prefect.blocks import PoolSource, database_url, pool_of, secret_block
from shoal.prefect.retries import job_task
from shoal.prefect.scope import current_flow_task

if TYPE_CHECKING:
    from shoal.jobs.metrics.series import MetricPoint

P = ParamSpec("P")
T = TypeVar("T")


class Training:
    """The job of one Prefect task, with methods to run and cancel the job.

    Args:
        spec: Spec of the job.
        pool_name: Name, URI or block of the pool. None: `spec` names the pool.
        digest: Digest of the code of the spec's function.
    """

    def __init__(self, spec: AnyJobSpec, pool_name: PoolSource, digest: str | None = None) -> None:
        self.logger = get_run_logger()
        self._team: str | None = None
        if pool_name is not None:
            pool = pool_of(pool_name)
            spec, self._team = spec.on_pool(pool.name), pool.team
        self._spec = spec
        self._task = current_flow_task(str(current_holder()), ancestors(), digest)
        self._transactions = Enclosing()
        self._handle: JobHandle | None = None
        self._progress = TrainingProgress()
        self._cancelled = threading.Event()
        self._limits = time_limits()
        on_interrupt(self.cancel)

    def run(self) -> JobResult:
        """Submit the job, and wait for its result. If Prefect repeats the task or the flow, attach to the job that was
        submitted before, or take its result.

        Raises:
            JobFailedError: The job ended without a result. The message ends with the cause.
            JobCancelledError: The job was cancelled.
        """
        task = self._task
        self._handle = submit(
            self._spec,
            holder=task.holder,
            task=task,
            connection_url=database_url,
            secret_of=secret_block,
            team=self._team,
        )
        if self.is_repeated:
            self.logger.info(
                "job %s, attempt %d, has succeeded in an earlier try of this run: its result is used, and nothing is "
                "trained again. With refresh_cache=True, the task trains anew",
                self._handle.job_id,
                self._handle.attempt,
            )
        else:
            self.logger.info("submitted or attached to job %s, attempt %d", self._handle.job_id, self._handle.attempt)
        show_page(self._handle.job_id)
        try:
            if self._cancelled.is_set():
                self._handle.cancel(why_ended(self._limits), unless_resubmitted=True)
            on_log = None if self.is_repeated else RunLog(self._handle.job_id)
            result = self._handle.wait(
                on_log=on_log, on_progress=self._progress, collect=not self._transactions.is_open
            )
        # After an error, such as a lost store, the job goes on, and a retry can attach to the job.
        except Exception:
            self._progress.flush()
            raise
        # Ctrl-C, and a cancellation or timeout of the task by Prefect, raise exceptions that are not subclasses of
        # Exception. They cancel the job.
        except BaseException:
            self.cancel()
            raise
        self._progress.flush()
        if self._transactions.is_open and not result.promoted:
            self._handle.collect()
        return result

    def finish(self, result: JobResult, emit: Callable[[], None]) -> None:
        """Send the event about a result. If the job has promoted a model inside a transaction, send the event when the
        transaction commits, and withdraw the promotion when it rolls back."""
        handle = self._handle
        assert handle is not None
        if self.is_repeated:
            return
        if not result.promoted or not self._transactions.is_open:
            emit()
            if result.promoted and self._transactions.is_rolled_back:
                self.logger.warning(
                    "Prefect has rolled back the transaction around this task before this try, so the promotion stays. "
                    "In a transaction, retry the flow instead of its tasks"
                )
            return

        def commit() -> None:
            handle.collect()
            emit()

        def roll_back() -> None:
            tracking = self._spec.tracking
            uri = tracking.uri if tracking else None
            said = withdraw_promotion(handle.job_id, handle.attempt, tracking_uri=uri, holder=self._task.holder)
            self.logger.warning("the transaction around the training was rolled back: %s", said)
            decision = result.decision and result.decision.model_copy(update={"sentence": said})
            self.report(result.model_copy(update={"promoted": False, "decision": decision}))

        self._transactions.finish(commit, roll_back)

    def report(self, result: JobResult) -> None:
        """Store the report on a training as a Prefect artifact."""
        assert self._handle is not None
        points: Sequence[MetricPoint] = ()
        tracking = self._spec.tracking
        with suppress(Exception):  # The report is stored even if the curves and links cannot be read.
            tracking = self._handle.spec.tracking
            points = self._handle.metrics()
        store_report(self._spec, result, points, tracking.uri if tracking else None)

    @property
    def is_repeated(self) -> bool:
        """Return whether an earlier try of the task or of the flow run already had the result of the job."""
        return self._handle is not None and self._handle.was_collected

    def cancel(self) -> None:
        """Cancel the job, unless a later try of the flow run has attached to it. A job that is not submitted yet is
        cancelled right after its submission.

        This method may be called from any thread.
        """
        self._cancelled.set()
        if self._handle is not None:
            self._handle.cancel(why_ended(self._limits), unless_resubmitted=True)


class TrainingTask(Task[..., Any]):
    """Prefect task that runs a training. A call of the task returns the training's result as a dict, even if the task
    run ends in the state ``Skipped``.

    If a task's function returns a state, a call of a plain Prefect task returns this state, although
    ``.submit(...).result()`` returns the value in the state.
    """

    @classmethod
    def of(cls, function: Callable[..., Any]) -> TrainingTask:
        """Create a Prefect task from a function that runs a training."""
        return cls._from(job_task(function, run_name=training_name))

    def __call__(self, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:
        """Run the task, and return the task's result. If `return_state` is True, return the final state of the task run
        instead."""
        found: Any = super().__call__(*args, return_state=return_state, **kwargs)
        if return_state:
            return found
        return _awaited(found) if inspect.isawaitable(found) else _value(found)

    def with_options(self, **options: Any) -> TrainingTask:
        """Return a copy of the task with other options, such as ``retries=2``."""
        return self._from(super().with_options(**options))

    @classmethod
    def _from(cls, plain: Any) -> TrainingTask:
        # `Task.with_options` always creates a plain `Task`, so the class of the new task is changed afterwards.
        plain.__class__ = cls
        made: TrainingTask = plain
        return made


def twin(sync: Task[P, T]) -> Task[P, Coroutine[Any, Any, T]]:
    """Return the async version of a task, with the same arguments. Its name is that of the task with the prefix "a".

    The task's function runs in a thread, so that the event loop goes on.
    """
    function = sync.fn

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        interrupt = Interrupt()
        token = interrupt_of_task.set(interrupt)
        try:
            return await in_thread(lambda: function(*args, **kwargs), interrupt.request)
        finally:
            interrupt_of_task.reset(token)

    call.__name__ = call.__qualname__ = f"a{function.__name__}"
    summary = (inspect.getdoc(function) or "").partition("\n\n")[0]
    call.__doc__ = f"{summary} This task is the async version of `{function.__name__}`."
    made: Any = TrainingTask.of(call) if isinstance(sync, TrainingTask) else job_task(call, run_name=sync.task_run_name)
    return cast(Task[P, Coroutine[Any, Any, T]], made)


async def _awaited(found: Awaitable[Any]) -> Any:
    return _value(await found)


def _value(found: Any) -> Any:
    """Return the value in `found` if `found` is a Prefect state; otherwise return `found` itself."""
    if not isinstance(found, State):
        return found
    # Prefect may wrap the value of a state in a record, whose attribute `result` is the value.
    return getattr(found.data, "result", found.data)


def task_value(result: JobResult) -> dict[str, Any]:
    """Convert a job's result to the value that a training task returns: a dict of JSON values.

    If the job has skipped its training, the function returns the Prefect state ``Skipped``, which contains the dict.
    Prefect has no state type for skipped runs, so ``Skipped`` is a state of the type Completed with its own name.
    """
    plain = result.to_dict()  # without NaN, which Prefect's JSON serializer would store as null
    if not result.skipped:
        return plain
    state: Any = Completed(name="Skipped", message=result.skipped, data=plain)
    # The type is cast to a dict, because callers of the task get the dict in `data` instead of the state.
    return cast(dict[str, Any], state)
