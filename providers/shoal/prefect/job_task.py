"""Make the Prefect tasks that run jobs (their name, retries and async version), and run the job of a task: submit it,
copy its log, cancel it with the run, and tie its promotion to the transaction around the task."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from prefect.transactions import BaseTransaction, get_transaction
from prefect.utilities.asyncutils import run_coro_as_sync

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import JobCancelledError, ShoalError
from shoal.jobs import AnyJobSpec, JobHandle, JobResult, ModelLine, NoResult, code_of, submit
from shoal.jobs.journal.metric_points import MetricPoint
from shoal.jobs.spec import is_spec
from shoal.kinds.plan.call import planned_size
from shoal.models import withdraw_promotion
from shoal.pool.api import ComputePool
from shoal.prefect import current_run
from shoal.prefect.blocks import PoolSource, database_url, pool_of, secret_block
from shoal.prefect.reports import RunLog, TrainingProgress, emit_outcome, show_page, store_report
from shoal.secrets.redaction import redact

_LONGEST_NAME = 200


def name_runs(task_name: str, name: Callable[..., str]) -> Callable[[dict[str, Any]], str]:
    """Return the function that names the runs of a task after a model or function: `name` of the task's arguments, and
    the registered model or the dataset, by which mapped runs differ.

    Prefect fails a task run whose name cannot be made, so after an error, the run has the name of the task.
    """

    def name_of(parameters: dict[str, Any]) -> str:
        try:
            named = " ".join([name(**parameters), *_distinction(**parameters)])
            return " ".join(redact(named).split())[:_LONGEST_NAME]
        except Exception:
            return task_name

    return name_of


def _distinction(spec: Any = None, dataset: Any = None, train: Any = None, **_: Any) -> list[str]:
    fields = dict(spec or {})
    if model := _registered(fields):
        return [model]
    data = dataset or (train or fields).get("dataset")
    return [] if data is None else [f"on {path}" for path in DatasetSpec.model_validate(data).paths[:1]]


def _registered(fields: Mapping[str, Any]) -> Any:
    register = fields.get("register_as") or fields.get("register")
    return register.get("model") if isinstance(register, Mapping) else getattr(register, "model", None)


def _training_name(spec: Any = None, train_func: Any = None, **_: Any) -> str:
    if _registered(dict(spec or {})):
        return "train"
    if train_func is None:
        return f"train {ModelLine.of(spec or {}, NoResult('')).model}"
    # With a function, `spec` is a dict of the other fields, which alone is no legal spec.
    return f"train {(spec or {}).get('name') or getattr(train_func, '__name__', None) or Path(train_func).name}"


_TRAINING_RUNS = name_runs("distributed_train", _training_name)


_logged: WeakKeyDictionary[ShoalError, UUID] = WeakKeyDictionary()
"""The task runs in whose log an error's refused retry is. Without it the reason would appear twice there, because
besides Prefect, `is_retried` calls the condition."""


# This must be a plain function: Prefect 3.7 and 3.8 never retry a task whose condition is another callable object.
def retry_unless_permanent(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Decide whether Prefect retries a task run, and log the reason if not: a permanent error is not retried.

    Permanent errors are a wrong argument, wrong data, a request for more than the pool has, and a job that a user has
    cancelled. All other errors are retried, such as a lost worker, or a pool that is down. Each task of `shoal.prefect`
    has this function as its ``retry_condition_fn``. Use it for your own tasks that call shoal, too, and call it in a
    condition of your own.

    Args:
        task: The task.
        task_run: Run of the task.
        state: Failed state of the run. Its data is the error.

    Returns:
        Whether the task run is retried.

    Example:
        >>> @task(retries=2, retry_condition_fn=retry_unless_permanent)
        ... def train():
        ...     return estimator.fit(dataset)
    """
    error = state.data
    if not isinstance(error, ShoalError) or not error.permanent:
        return True
    if _logged.get(error) != task_run.id:
        _logged[error] = task_run.id
        cancelled = isinstance(error, JobCancelledError)
        why = "a user has cancelled the job" if cancelled else "a retry would fail in the same way"
        get_run_logger().warning("the task is not retried, because %s: %s", why, error)
    return False


def job_task(function: Callable[P, T], *, run_name: str | Callable[..., str] | None = None) -> Task[P, T]:
    """Create a Prefect task whose results are not cached, and that is not retried after a permanent error."""
    return task(cache_policy=NO_CACHE, retry_condition_fn=retry_unless_permanent, task_run_name=run_name)(function)


def is_retried(error: Exception) -> bool:
    """Return whether Prefect will retry the current task run after an error; False outside of a task."""
    run = TaskRunContext.get()
    if run is None or run.task_run.run_count > run.task.retries:
        return False
    condition: Any = run.task.retry_condition_fn
    try:
        answer = condition(run.task, run.task_run, Failed(data=error)) if condition else True
        return bool(run_coro_as_sync(answer) if inspect.iscoroutine(answer) else answer)
    except Exception:  # Prefect logs the error of a condition, and does not retry the task.
        return False


class Enclosing:
    """The transactions around the current task run: blocks of ``transaction()``, and those of tasks that call the task.

    If a try of a task fails, Prefect rolls back the transactions around the task for good, also if a retry succeeds. A
    try that begins after that is not part of these transactions.

    Attributes:
        is_open: Whether the task run is part of a transaction.
        is_rolled_back: Whether Prefect has rolled back a transaction before this try began.
    """

    def __init__(self) -> None:
        self._own = get_transaction()
        self._is_committed = False
        around = list(self._around())
        self.is_rolled_back = any(each.is_rolled_back() for each in around)
        self.is_open = bool(around) and not any(map(_has_ended, around))

    def finish(self, commit: Callable[[], object], roll_back: Callable[[], object]) -> None:
        """Call `commit` or `roll_back` when the transaction ends in this way. Call the function at once if the
        transaction has ended since the try began."""
        assert self._own is not None
        ended = next(filter(_has_ended, self._around()), None)
        if ended is not None:
            roll_back() if ended.is_rolled_back() else commit()
            return
        # The functions run after the task has ended. In its context, they log to the log of the task run, and their
        # events name it.
        context = copy_context()

        def on_commit(_: BaseTransaction) -> None:
            context.run(commit)
            self._is_committed = True

        def withdraw_promotion(_: BaseTransaction) -> None:
            if not self._is_committed:  # after its commit, Prefect rolls back a task whose result cannot be stored
                context.run(roll_back)

        self._own.on_commit_hooks.append(on_commit)
        self._own.on_rollback_hooks.append(withdraw_promotion)

    def _around(self) -> Iterator[BaseTransaction]:
        """Yield the transactions around that of the task run, the innermost first, up to the first that has ended."""
        found = self._own
        while found is not None and (found := found.get_parent()) is not None and found is not self._own:
            yield found
            if _has_ended(found):
                return


def _has_ended(transaction: BaseTransaction) -> bool:
    return transaction.is_committed() or transaction.is_rolled_back()


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
        self._task = current_run.current_flow_task(str(current_run.current_holder()), current_run.ancestors(), digest)
        self._transactions = Enclosing()
        self._handle: JobHandle | None = None
        self._progress = TrainingProgress()
        self._cancelled = threading.Event()
        self._limits = current_run.time_limits()
        current_run.on_interrupt(self.cancel)

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
                self._handle.cancel(current_run.why_ended(self._limits), unless_resubmitted=True)
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

    def finish(self, result: JobResult) -> None:
        """Store the report on a result, and send the event. If the job has promoted a model inside a transaction, send
        the event when the transaction commits, and withdraw the promotion when it rolls back."""
        handle = self._handle
        assert handle is not None
        self._report(result)
        if self.is_repeated:
            return
        if not result.promoted or not self._transactions.is_open:
            emit_outcome(self._spec, result)
            if result.promoted and self._transactions.is_rolled_back:
                self.logger.warning(
                    "Prefect has rolled back the transaction around this task before this try, so the promotion stays. "
                    "In a transaction, retry the flow instead of its tasks"
                )
            return

        def commit() -> None:
            handle.collect()
            emit_outcome(self._spec, result)

        def roll_back() -> None:
            tracking = self._spec.tracking
            uri = tracking.uri if tracking else None
            said = withdraw_promotion(handle.job_id, handle.attempt, tracking_uri=uri, holder=self._task.holder)
            self.logger.warning("the transaction around the training was rolled back: %s", said)
            decision = result.decision and result.decision.model_copy(update={"sentence": said})
            self._report(result.model_copy(update={"promoted": False, "decision": decision}))

        self._transactions.finish(commit, roll_back)

    def _report(self, result: JobResult) -> None:
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
            self._handle.cancel(current_run.why_ended(self._limits), unless_resubmitted=True)


class TrainingTask(Task[..., Any]):
    """Prefect task that runs a training. A call of the task returns the training's result as a dict, even if the task
    run ends in the state ``Skipped``.

    If a task's function returns a state, a call of a plain Prefect task returns this state, although
    ``.submit(...).result()`` returns the value in the state.
    """

    @classmethod
    def of(cls, function: Callable[..., Any]) -> TrainingTask:
        """Create a Prefect task from a function that runs a training."""
        return cls._from(job_task(function, run_name=_TRAINING_RUNS))

    def __call__(self, *args: Any, return_state: bool = False, **kwargs: Any) -> Any:
        """Run the task, and return the task's result. If `return_state` is True, return the final state of the task run
        instead."""
        found: Any = super().__call__(*args, return_state=return_state, **kwargs)
        if return_state or not inspect.isawaitable(found):
            return found if return_state else _value(found)

        async def value() -> Any:
            return _value(await found)

        return value()

    def with_options(self, **options: Any) -> TrainingTask:
        """Return a copy of the task with other options, such as ``retries=2``."""
        return self._from(super().with_options(**options))

    @classmethod
    def _from(cls, plain: Any) -> TrainingTask:
        # `Task.with_options` always creates a plain `Task`, so the class of the new task is changed afterwards.
        plain.__class__ = cls
        return cast(TrainingTask, plain)


def twin(sync: Task[P, T]) -> Task[P, Coroutine[Any, Any, T]]:
    """Return the async version of a task, with the same arguments. Its name is that of the task with the prefix "a".

    The task's function runs in a thread, so that the event loop goes on.
    """
    function = sync.fn

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        interrupt = current_run.Interrupt()
        token = current_run.interrupt_of_task.set(interrupt)
        try:
            return await current_run.in_thread(lambda: function(*args, **kwargs), interrupt.request)
        finally:
            current_run.interrupt_of_task.reset(token)

    call.__name__ = call.__qualname__ = f"a{function.__name__}"
    summary = (inspect.getdoc(function) or "").partition("\n\n")[0]
    call.__doc__ = f"{summary} This task is the async version of `{function.__name__}`."
    made: Any = TrainingTask.of(call) if isinstance(sync, TrainingTask) else job_task(call, run_name=sync.task_run_name)
    return cast(Task[P, Coroutine[Any, Any, T]], made)


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


def planner_of(pool: ComputePool, plan_for: AnyJobSpec | Mapping[str, Any]) -> Callable[[], int]:
    """Return the function that plans the number of nodes for a training, in a job of the current task or flow run."""
    task = current_run.current_flow_task(pool.holder, current_run.ancestors(), None)
    submission = {"task": task, "connection_url": database_url, "secret_of": secret_block}
    return partial(planned_size, pool, plan_for, get_run_logger().info, **submission)


def run_job(
    given: AnyJobSpec | Mapping[str, Any] | None, pool_name: PoolSource, build: Callable[[], AnyJobSpec], *code: Any
) -> dict[str, Any]:
    """Run the job of a task, wait for its result, and return the value of the task. Store the report and send the
    event, also of a failure.

    Args:
        given: The task's spec or fields, which name the model if no spec can be built.
        pool_name: Name, URI or block of the pool. None: the spec names the pool.
        build: Function that returns the spec of the job.
        code: Function of the user, and its arguments, if the spec does not have their digest.
    """
    with failure_event(given):
        spec = build()
    with failure_event(spec):
        training = Training(spec, pool_name, code_of(spec, *code))
        result = training.run()
    training.finish(result)
    return task_value(result)


@contextmanager
def failure_event(spec: AnyJobSpec | Mapping[str, Any] | str | None) -> Iterator[None]:
    """Send the event ``shoal.model.failed`` if the ``with`` block raises an exception and Prefect does not retry the
    task. If there is a spec, store the report, too.

    A run that is cancelled sends no event, because its end is not a failure of the job.
    """
    try:
        yield
    except Exception as error:
        interrupt = current_run.interrupt_of_task.get()
        is_cancelled = interrupt is not None and interrupt.is_requested
        if not is_cancelled and not is_retried(error):
            emit_outcome(spec, error)
            if is_spec(spec):
                store_report(spec, error)
        raise
