"""Build the contents of a job's page from the job's rows in the store, its log and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shoal import jobs
from shoal.errors import ShoalError
from shoal.jobs.files.artifacts import load_statistics
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal import attempts
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.metrics.series import MetricPoint
from shoal.jobs.results import JobResult
from shoal.jobs.status import JobLine, JobStatus
from shoal.links import Link, mlflow_run_link, model_link
from shoal.redaction import redact
from shoal.state import Store
from shoal.state.home import is_own_store
from shoal.state.schema import JOB_ENDED
from shoal.training.boosting.request import TrainResult, WorkerStats
from shoal.ui.formats import finite
from shoal.ui.live import BackgroundReader
from shoal.ui.partitions_view import PartitionsView, partitions_view
from shoal.ui.run_links import RunLinks
from shoal.ui.trials_view import TrialsView, trials_view

_LOG_BYTES = 32_768
"""Number of bytes at the end of a job's log that the page shows."""

_LOG_LINES = 200

_MOST_POINTS = 2_000
"""Largest number of points of a curve."""

_FACTS = ("kind", "library", "framework", "num_boost_round", "n_estimators", "objective", "num_workers")


@dataclass(frozen=True)
class Phase:
    """A phase of an attempt, such as "running". `start` and `share` are percentages of the attempt's whole time."""

    name: str
    seconds: float
    start: float
    share: float


@dataclass(frozen=True)
class JobView:
    """Contents of the page about a job's attempt.

    Attributes:
        line: The attempt, as the list of jobs shows it.
        result: Result of the attempt; None if the attempt has not succeeded.
        facts: Settings of the training by name.
        phases: Phases of the attempt: waiting, starting and running.
        workers: Rows, time and memory of each worker of a finished boosting training; empty if they are not known.
        partitions: The partitions that have ended; None if there are none, or if their files are not on this machine.
        trials: Trials of a search that have ended; None if there are none, or if the job is no search.
        curves: Data of the plot of metrics; None if there are no metrics.
        log: End of the log.
        log_problem: Reason why the log cannot be shown.
        links: Links to other services.
    """

    line: JobLine
    result: JobResult | None
    facts: Mapping[str, str]
    phases: Sequence[Phase]
    workers: Sequence[WorkerStats]
    partitions: PartitionsView | None
    trials: TrialsView | None
    curves: dict[str, Any] | None
    log: str
    log_problem: str | None
    links: Sequence[Link]


def job_view(
    store: Store,
    line: JobLine,
    points: Sequence[MetricPoint],
    logs: BackgroundReader[tuple[str, str | None]],
    now: float,
) -> JobView:
    """Build the contents of a job's page."""
    job = attempts.load(store, line.key)
    status = JobStatus.of(job)
    facts, tracking_uri, location = _settings(job.spec)
    log, problem = _log(store, line, logs)
    # The paths are in rows that users of another store can write.
    trained = _training_report(status.result, location) if is_own_store() else None
    found = [
        RunLinks(store).link(line.holder, line.task_key),
        mlflow_run_link(tracking_uri, line.mlflow_run_id),
        model_link(tracking_uri, facts["model"], status.result.model_version if status.result else None)
        if "model" in facts
        else None,
    ]
    return JobView(
        line=line,
        result=status.result,
        facts=facts,
        phases=phases_of(line, now),
        workers=trained.workers if trained else (),
        partitions=partitions_view(job, status.result, location) if is_own_store() else None,
        trials=trials_view(store, line.key, job, status.result),
        curves=_curves(line, points),
        log=log,
        log_problem=problem,
        links=[link for link in found if link is not None],
    )


def phases_of(line: JobLine, now: float) -> list[Phase]:
    """Return the phases of an attempt (waiting for room, starting and running) with their durations."""
    end = line.ended_at or now
    admitted = line.admitted_at or (line.started_at if line.queued_at else line.queued_at) or end
    bounds = [
        ("waiting for room", line.queued_at or line.created_at, admitted if line.queued_at else line.created_at),
        ("starting", line.admitted_at or (None if is_waiting(line) else line.created_at), line.started_at or end),
        ("running", line.started_at, end),
    ]
    parts = [(name, max(0.0, until - since)) for name, since, until in bounds if since is not None]
    whole = sum(seconds for _, seconds in parts) or 1.0
    found, start = [], 0.0
    for name, seconds in parts:
        share = 100 * seconds / whole
        found.append(Phase(name, seconds, start, share))
        start += share
    return found


def _settings(document: Mapping[str, Any]) -> tuple[dict[str, str], str | None, str | None]:
    """Return three parts of a spec: the main settings by name, the MLflow tracking URI, and the artifact location."""
    try:
        spec = jobs.parse_spec(dict(document))
    except ShoalError:  # this version cannot read the spec, because a newer version of shoal has written it
        return {}, None, None
    plain = spec.model_dump(mode="json")
    facts = {name.replace("_", " "): str(plain[name]) for name in _FACTS if plain.get(name) not in (None, "", -1)}
    if spec.register_as is not None:
        facts["model"] = spec.register_as.model
    datasets = [path for dataset in spec.datasets() for path in dataset.paths or ()]
    if datasets:
        facts["data"] = redact(datasets[0]) + (f" and {len(datasets) - 1} more" if len(datasets) > 1 else "")
    tracking = spec.tracking.uri if spec.tracking else None
    return facts, tracking, spec.run_config.artifact_location


def _curves(line: JobLine, points: Sequence[MetricPoint]) -> dict[str, Any] | None:
    """Return the data for the plot of metrics; None if there are none."""
    is_boosting = line.progress is not None and line.progress.unit == "rounds"
    first = 1 if is_boosting else 0  # users count rounds from 1
    names = dict.fromkeys(name for point in points for name in point.values)
    seen = [_curve(name, [point for point in points if name in point.values], first) for name in names]
    return {"kind": "curves", "unit": "round" if is_boosting else "step", "series": seen} if seen else None


def _curve(name: str, points: Sequence[MetricPoint], first: int) -> dict[str, Any]:
    """Return a curve with at most 2,000 of the points, evenly chosen, and the last one."""
    chosen = points[:: -(-len(points) // _MOST_POINTS)]
    if chosen[-1] is not points[-1]:
        chosen = [*chosen, points[-1]]
    return {
        "name": name,
        "x": [point.step + first for point in chosen],
        "y": [finite(point.values[name]) for point in chosen],
    }


def _training_report(result: JobResult | None, location: str | None) -> TrainResult | None:
    """Return the report of a finished boosting training; None if the report's file is not on this host."""
    if result is None or result.skipped or location or not result.model_path.startswith("/"):
        return None
    return _read_report(result.model_dump_json())


@lru_cache(maxsize=64)
def _read_report(result: str) -> TrainResult | None:
    """Read the report of a finished boosting training from the report file in the model's folder."""
    try:
        return load_statistics(JobResult.model_validate_json(result))
    except (OSError, ValueError, ShoalError):
        # The file was removed or is on another host, or the job ran a function and so has no such report.
        return None


def _log(store: Store, line: JobLine, logs: BackgroundReader[tuple[str, str | None]]) -> tuple[str, str | None]:
    """Return the end of an attempt's log, or the reason why there is none. A log that is not on this machine comes from
    the pool's head, which may not answer, so a thread asks for this log."""
    if is_waiting(line):
        return "", "no line was written yet"
    if log_path(line.key).exists() or not is_own_store():
        return _log_end(store, line)
    key = f"{line.job_id} {line.attempt} {line.state in JOB_ENDED}"
    return logs.last(key, lambda: _log_end(store, line)) or ("", "the pool's head is asked for the log")


def _log_end(store: Store, line: JobLine) -> tuple[str, str | None]:
    """Return the last lines of an attempt's log and None; if there are no lines, an empty text and the reason."""
    try:
        size = log_path(line.key).stat().st_size
    except OSError:
        size = 0
    try:
        follower = jobs.attach(line.job_id, line.attempt, store=store).log_follower(max(0, size - _LOG_BYTES))
        lines = list(follower.lines(ended=True))
    except (ShoalError, OSError) as error:
        return "", str(error)
    if size > _LOG_BYTES:
        lines = lines[1:]  # reading began in the middle of the first line
    text = redact("\n".join(lines[-_LOG_LINES:]))
    if text:
        return text, None
    is_elsewhere = line.state in JOB_ENDED or not is_own_store()
    return "", "the log is on the pool's host" if is_elsewhere else "no line was written yet"
