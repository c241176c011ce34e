"""Show in Prefect what pools and jobs do: progress, log, link to the page, report on a training, and events.

Automations in Prefect can react to the events by sending a notification or running a deployment.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect import artifacts
from prefect.events import emit_event
from prefect.logging import get_run_logger

from shoal import jobs
from shoal.errors import InvalidArgumentError, ScaleError
from shoal.jobs.journal.metric_points import MetricPoint, curves
from shoal.links import Link, job_page, mlflow_run_link, model_link
from shoal.pool.status import PoolStatus
from shoal.prefect.current_run import on_interrupt
from shoal.training.reporting import Progress

_MODEL = "shoal.model."
"""Prefix of the names of events about models, followed by the outcome of a training, such as ``promoted``; and of the
resource ids of models, followed by the name of the registered model."""


def emit_outcome(
    spec: jobs.AnyJobSpec | Mapping[str, Any] | str | None, outcome: jobs.JobResult | jobs.PromotionResult | Exception
) -> None:
    """Send the event about the outcome of a job or promotion: ``shoal.model.promoted``, ``.kept``, ``.waiting``,
    ``.trained``, ``.predicted``, ``.failed`` or ``.skipped``.

    An error while sending is logged and not raised, because it must not fail a task whose work has succeeded, and must
    not hide the cause of a failure.
    """
    try:
        line = jobs.ModelLine.of(spec or {}, outcome)
        message = jobs.summary_message([line])
        payload = {**line.to_dict(), "subject": message.subject, "text": message.text}
        if isinstance(outcome, jobs.JobResult | jobs.PromotionResult):
            payload |= outcome.to_dict()
        emit_event(f"{_MODEL}{line.outcome}", _resource(_MODEL, line.model), payload=payload)
    except Exception as error:
        get_run_logger().warning("the Prefect event about the job could not be sent: %s", error)


def emit_alerts(
    *,
    promoted_within: timedelta | None = None,
    started_within: timedelta | None = None,
    models: Collection[str] | None = None,
) -> list[str]:
    """Send an event for each model whose last promotion is too long ago, and for each job that has waited too long.

    The events are ``shoal.model.stale`` and ``shoal.job.waiting``.

    Call this function in a flow that runs periodically. Each call sends the events again. To get one notification a
    day, give the automation's trigger ``within=timedelta(days=1)`` and ``for_each={"prefect.resource.id"}``.

    Args:
        promoted_within: Longest allowed time since a model's last promotion. None: promotions are not checked.
        started_within: Longest time that a job may wait in the queue of its pool. None: jobs are not checked.
        models: Names of the models to check; a model that was never trained is stale, too. None: all models that
            shoal's store knows.

    Returns:
        One sentence for each event.

    Raises:
        InvalidArgumentError: Both limits are missing, or a limit is not a positive duration.
    """
    if promoted_within is None and started_within is None:
        raise InvalidArgumentError("emit_alerts has nothing to check: give promoted_within, started_within or both")
    sentences = []
    for model in jobs.stale_models(promoted_within, models) if promoted_within is not None else ():
        payload = {"alias": model.alias, "version": model.version, "days": model.days, "text": str(model)}
        emit_event(f"{_MODEL}stale", _resource(_MODEL, model.model), payload=payload)
        sentences.append(str(model))
    for job in jobs.waiting_jobs(started_within) if started_within is not None else ():
        payload = {"pool": job.pool, "holder": job.holder, "hours": job.hours, "text": str(job)}
        emit_event("shoal.job.waiting", _resource("shoal.job.", job.job_id), payload=payload)
        sentences.append(str(job))
    return sentences


def _resource(prefix: str, name: str) -> dict[str, str]:
    return {"prefect.resource.id": f"{prefix}{name}", "prefect.resource.name": name}


PAGE_KEY = "shoal-job"

PROGRESS_PERIOD_S = 5.0
"""Shortest time between two writes of a progress artifact. Each is a request, of which Prefect Cloud allows 250 to
2,000 a minute for all runs together."""

LINES_PER_MINUTE = 100
"""Most lines of a job's log that are copied to Prefect in a minute. Prefect Cloud allows 500 to 10,000 for all runs
together, and refuses the lines of all runs that are over."""

# `TrainingProgress` calls these functions in a thread. In an async task, Prefect would use their async versions;
# `_sync=True` makes Prefect use the sync versions. The type is Any because Prefect's type hints do not contain the
# argument `_sync`.
_artifacts: Any = artifacts


def show_page(job_id: str) -> None:
    """Create a Prefect link artifact to a job's page. Do nothing if ``SHOAL_UI_URL`` is not set."""
    address = job_page(job_id)
    if address is None:
        return
    try:
        _artifacts.create_link_artifact(address, link_text=f"Job {job_id}", key=PAGE_KEY, _sync=True)
    except Exception as error:  # The job is already running. A missing link must not make the task fail.
        get_run_logger().warning("the link to the job's page could not be stored: %s", error)


class NodeLog:
    """An `on_progress` callback that logs the number of active nodes, and can interrupt the call that waits for nodes.

    Args:
        holder: Name of the holder whose lease the run waits for. If this lease is in the pool's queue, the lease's
            place is logged, too. None if the run does not wait for a lease.
    """

    def __init__(self, holder: str | None = None) -> None:
        self._holder = holder
        self._logger = get_run_logger()
        self._last_logged = ""
        self._interrupted = False
        on_interrupt(self.interrupt)

    def interrupt(self) -> None:
        """Make the next call of this object raise ScaleError, so that the wait ends and the request for nodes is rolled
        back.

        This method may be called from any thread.
        """
        self._interrupted = True

    def __call__(self, status: PoolStatus) -> None:
        """Log the number of active nodes, and the lease's place in the queue, if either has changed."""
        if self._interrupted:
            raise ScaleError(f'the wait for nodes of pool "{status.name}" was cancelled')
        line = f"{status.name}: {status.progress(self._holder)}"
        if line != self._last_logged:
            self._logger.info(line)
            self._last_logged = line


class TrainingProgress:
    """An `on_progress` callback that shows a job's progress in Prefect's UI, as a progress artifact of the task run.

    A training whose number of steps is not known, such as a user's own function, gets no artifact.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = get_run_logger()
        self._clock = clock
        self._artifact: UUID | None = None
        self._next = clock()
        self._held_back: Progress | None = None
        self._has_failed = False

    def __call__(self, progress: Progress) -> None:
        """Create or update the progress artifact, unless it was written less than five seconds ago."""
        self._held_back = progress
        if self._clock() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write the last progress that was held back. After an error, log a warning; the next call tries again."""
        progress, self._held_back = self._held_back, None
        if progress is None or progress.total is None:
            return
        self._next = self._clock() + PROGRESS_PERIOD_S
        percent, text = 100.0 * progress.done / progress.total, str(progress)
        try:
            if self._artifact is None:
                self._artifact = _artifacts.create_progress_artifact(percent, None, text, _sync=True)
            else:
                _artifacts.update_progress_artifact(self._artifact, percent, text, _sync=True)
        except Exception as error:  # A problem with the progress display must not make the training fail.
            if not self._has_failed:
                self._logger.warning("the Prefect artifact with the progress could not be written: %s", error)
            self._has_failed = True


class RunLog:
    """An `on_log` callback that copies a job's log to the log of the Prefect run, up to a number of lines a minute."""

    def __init__(self, job_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = get_run_logger()
        self._clock = clock
        self._all_lines = job_page(job_id) or f"`shoal jobs logs {job_id}`"
        self._minute_ends = clock()
        self._lines = 0

    def __call__(self, line: str) -> None:
        """Log a line. Instead of the first line over the limit, log where all lines are."""
        now = self._clock()
        if now >= self._minute_ends:
            self._minute_ends, self._lines = now + 60.0, 0
        self._lines += 1
        if self._lines <= LINES_PER_MINUTE:
            self._logger.info(line)
        elif self._lines == LINES_PER_MINUTE + 1:
            self._logger.info(
                "the job logs more than %d lines a minute, so lines are left out here. All lines: %s",
                LINES_PER_MINUTE,
                self._all_lines,
            )


KEY = "shoal-training"
"""Key of the reports on jobs whose model has no name in MLflow's registry."""

_MOST_CURVES = 12
"""Number of metrics whose curves a report shows. A training function may log hundreds."""

_WIDTH = 32

_BARS = "▁▂▃▄▅▆▇█"


def store_report(
    spec: jobs.AnyJobSpec,
    outcome: jobs.JobResult | Exception,
    points: Sequence[MetricPoint] = (),
    tracking_uri: str | None = None,
) -> None:
    """Store the report on a job as an artifact of the task run, with the key of its model."""
    line = jobs.ModelLine.of(spec, outcome)
    try:
        if isinstance(outcome, Exception):
            text = f"# {_text(spec.label)}: failed\n\n{_text(line.sentence)}"
        else:
            text = report(spec, outcome, points, tracking_uri)
        _artifacts.create_markdown_artifact(text, report_key(spec), str(line), _sync=True)
    except Exception as error:  # The job has ended. A missing report in the UI must not make the task fail.
        get_run_logger().warning("the report on the job could not be stored as an artifact: %s", error)


def report_key(spec: jobs.AnyJobSpec) -> str:
    """Return the key of the report on a registered model, or on its predictions. Other names than those that are legal
    keys get a digest, so that the reports on the models "UA 1" and "ua-1" have different keys."""
    name = spec.registered_model
    if name is None:
        return KEY
    legal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    digest = "" if legal == name else f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"shoal-{'model' if spec.register_as else 'predictions'}-{legal}{digest}"


def report(
    spec: jobs.AnyJobSpec, result: jobs.JobResult, points: Sequence[MetricPoint], tracking_uri: str | None
) -> str:
    """Return the report on a job as markdown."""
    register, version, line = spec.register_as, result.model_version, jobs.ModelLine.of(spec, result)
    name = f"{register.model} version {version}" if register and version else spec.label
    page = job_page(result.job_id)
    seconds = f"{result.seconds:.1f}"
    facts = {
        "model": result.model_uri,
        "rows": None if result.rows is None else f"{result.rows:,}",
        "workers": str(result.num_workers),
        "seconds": seconds if result.times is None else f"{seconds} ({result.times})",
        "id": f"{result.job_id}, attempt {result.attempt}",
        "MLflow run": result.mlflow_run_id,
    }
    links = [
        mlflow_run_link(tracking_uri, result.mlflow_run_id),
        model_link(tracking_uri, register.model, version) if register and version else None,
        Link("Job in shoal", page) if page else None,
    ]
    parts = [
        f"# {_text(name)}: {line.outcome}",
        _text(line.sentence),
        _table(("metric", "value"), {name: f"{value:.6g}" for name, value in sorted(result.metrics.items())}),
        _curves(points, spec.framework),
        _table(("job", ""), {name: fact for name, fact in facts.items() if fact is not None}),
        " · ".join(f"[{link.label}](<{link.address}>)" for link in links if link is not None),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {_text(name)} | {_text(value)} |" for name, value in rows.items())])


def _curves(points: Sequence[MetricPoint], framework: str) -> str:
    """Return the curves of all metrics as text, because Prefect's pages show no plots in markdown."""
    unit, every = curves(points, framework)
    found = {
        name: curve
        for name, curve in every.items()
        if len(curve) > 1 and any(math.isfinite(value) for _, value in curve)
    }
    if not found:
        return ""
    shown = dict(list(found.items())[:_MOST_CURVES])
    rows = []
    for name, curve in shown.items():
        (first_step, first_value), (last_step, last_value) = curve[0], curve[-1]
        bars = sparkline([value for _, value in curve])
        rows.append((name, f"{first_value:.4g}", bars, f"{last_value:.4g}", f"{unit}s {first_step} to {last_step}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    more = [f"and {len(found) - len(shown)} more metrics"] if len(found) > len(shown) else []
    return "\n".join(["```", *(line.replace("```", "'''") for line in [*lines, *more]), "```"])


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
