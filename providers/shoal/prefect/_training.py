"""Run a job from a Prefect task: submit the job, copy the job's log to the run's log, cancel the job if the run is
cancelled, tie its promotion to the transaction around the task, and report on the trained model."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from prefect import State, Task
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.transactions import BaseTransaction, get_transaction

from shoal.jobs import AnyJobSpec, JobHandle, JobResult, submit
from shoal.links import Link, job_page, mlflow_run_link, model_link
from shoal.models import withdraw_promotion
from shoal.prefect._names import training_name
from shoal.prefect._progress import RunLog, TrainingProgress, show_page
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
from shoal.prefect.blocks import PoolSource, database_url, pool_of, secret_block
from shoal.prefect.retries import job_task
from shoal.prefect.scope import current_flow_task

if TYPE_CHECKING:
    from shoal.jobs.journal.metric_series import MetricPoint

KEY = "shoal-training"
"""Key of the reports on models without a name in MLflow's registry."""

_MOST_CURVES = 12
"""Number of metrics whose curves a report shows. A training function may log hundreds."""

_WIDTH = 32
_BARS = "▁▂▃▄▅▆▇█"

# Without `_sync`, an async task would get a coroutine: see `_create` in `_progress`.
_markdown: Any = create_markdown_artifact


def store_report(spec: AnyJobSpec, result: JobResult, points: Sequence[MetricPoint], tracking_uri: str | None) -> None:
    """Store the report on a training as an artifact of the task run, with the key of its model.

    Args:
        spec: Spec of the job.
        result: Result of the job.
        points: Metrics of the training by step.
        tracking_uri: URI of the MLflow server or database.
    """
    description = f"{_outcome(result)}: job {result.job_id}"
    try:
        _markdown(report(spec, result, points, tracking_uri), report_key(spec), description, _sync=True)
    except Exception as error:  # The training has ended. A missing report in the UI must not make the task fail.
        get_run_logger().warning("the report on the training could not be stored as an artifact: %s", error)


def report_key(spec: AnyJobSpec) -> str:
    """Return the key of the report on a registered model. Other names than those that are legal keys get a digest, so
    that the reports on the models "UA 1" and "ua-1" have different keys."""
    if spec.register_as is None:
        return KEY
    name = spec.register_as.model
    legal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    digest = "" if legal == name else f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"shoal-model-{legal}{digest}"


def report(spec: AnyJobSpec, result: JobResult, points: Sequence[MetricPoint], tracking_uri: str | None) -> str:
    """Return the report on a training as markdown."""
    register, version = spec.register_as, result.model_version
    name = f"{register.model} version {version}" if register and version else spec.label
    page = job_page(result.job_id)
    links = [
        mlflow_run_link(tracking_uri, result.mlflow_run_id),
        model_link(tracking_uri, register.model, version) if register and version else None,
        Link("Job in shoal", page) if page else None,
    ]
    parts = [
        f"# {_text(name)}: {_outcome(result)}",
        _text(result.skipped or (result.decision.sentence if result.decision else "")),
        _table(("metric", "value"), {name: f"{value:.6g}" for name, value in sorted(result.metrics.items())}),
        _curves(points, first=1 if spec.framework in ("xgboost", "lightgbm") else 0),
        _table(("training", ""), _facts(result)),
        " · ".join(f"[{link.label}](<{link.address}>)" for link in links if link is not None),
    ]
    return "\n\n".join(part for part in parts if part)


def _outcome(result: JobResult) -> str:
    if result.skipped:
        return "skipped"
    undecided = "waits for a decision" if result.decision else "trained"
    return {True: "promoted", False: "not promoted", None: undecided}[result.promoted]


def _facts(result: JobResult) -> dict[str, str]:
    """Return what a report says about the job."""
    seconds = f"{result.seconds:.1f}"
    facts = {
        "model": result.model_uri,
        "rows": None if result.rows is None else f"{result.rows:,}",
        "workers": str(result.num_workers),
        "seconds": seconds if result.times is None else f"{seconds} ({result.times})",
        "job": f"{result.job_id}, attempt {result.attempt}",
        "MLflow run": result.mlflow_run_id,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {_text(name)} | {_text(value)} |" for name, value in rows.items())])


def _curves(points: Sequence[MetricPoint], first: int) -> str:
    """Return the curves of all metrics as text, because Prefect's pages show no plots in markdown."""
    found = {}
    for name in dict.fromkeys(name for point in points for name in point.values):
        curve = [(point.step + first, point.values[name]) for point in points if name in point.values]
        if len(curve) > 1 and any(math.isfinite(value) for _, value in curve):
            found[name] = curve
    if not found:
        return ""
    shown = dict(list(found.items())[:_MOST_CURVES])
    rows = [
        (name, f"{curve[0][1]:.4g}", sparkline([value for _, value in curve]), f"{curve[-1][1]:.4g}", _steps(curve))
        for name, curve in shown.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    more = [f"and {len(found) - len(shown)} more metrics"] if len(found) > len(shown) else []
    return "\n".join(["```", *(line.replace("```", "'''") for line in [*lines, *more]), "```"])


def _steps(curve: Sequence[tuple[int, float]]) -> str:
    return f"steps {curve[0][0]} to {curve[-1][0]}"


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a line of bars, at most 32 characters wide; a space stands for NaN and infinity."""
    step = max(1.0, (len(values) - 1) / (_WIDTH - 1))
    chosen = [values[round(place * step)] for place in range(min(len(values), _WIDTH))]
    finite = [value for value in chosen if math.isfinite(value)]
    low = min(finite, default=0.0)
    height = max(finite, default=0.0) - low
    if not height or not math.isfinite(height):
        return "".join(_BARS[3] if math.isfinite(value) else " " for value in chosen)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / height * top)] if math.isfinite(value) else " " for value in chosen)


def _text(text: str) -> str:
    """Return a text in one line, in which markdown finds no markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


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
