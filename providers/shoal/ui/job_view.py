"""Build the contents of a job's page, with its partitions or trials, from rows, logs and results."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from shoal import jobs
from shoal.errors import ShoalError
from shoal.installation import pip_install
from shoal.jobs.files.artifacts import load_statistics
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal import attempts, study_logs
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.metric_points import MetricPoint, curves
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.results import JobResult, finite
from shoal.jobs.status import JobLine, JobStatus
from shoal.kinds.partitions.keys import shown_key
from shoal.kinds.partitions.spec import PARTITIONS
from shoal.kinds.search import study_storage
from shoal.kinds.search.spec import TUNE
from shoal.kinds.search.study_storage import Ended, best_first, copy_of
from shoal.links import mlflow_run_link, model_link
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.home import is_own_store
from shoal.state.schema import JOB_ENDED, Job
from shoal.training.boosting.params import Direction
from shoal.training.boosting.request import TrainResult
from shoal.ui.formats import RunLinks
from shoal.ui.live import BackgroundReader

_MOST_TRIALS = 200
"""Largest number of trials in the table."""

_MOST_PARAMS = 8
"""Largest number of parameters of which the values are plotted."""

_LEAST_COMPLETE = 4
"""Number of trials with a value from which on importances are estimated. PED-ANOVA compares the best tenth, but at
least two trials, with the others."""


def trials_view(store: Store, key: Key, job: Job, result: JobResult | None) -> dict[str, Any] | None:
    """Return the trials of a search; None if the job is no search, or no trial has ended.

    Returns:
        best: The trials that have ended, the best first, at most 200.
        plots: Title, text in place of the picture, and data of each plot; empty if no trial has a value.
        install: Command that installs Optuna, if the importances of the parameters are missing without it; else False.
    """
    if job.framework != TUNE:
        return None
    study = study_logs.study_of(store, key)
    found = study_storage.read_trials(store, key.job_id, study)
    # Before the result, the direction is known only if the spec has it; the table then has the newest trials first.
    direction = result.search.direction if result and result.search else job.spec.get("direction")
    if not found:
        return None
    complete = [each for each in found if each.state == "complete" and each.value is not None]
    name = job.spec.get("metric") or "value"
    plots: list[tuple[str, str, Mapping[str, Any]]] = []
    if complete:
        plots.append(("Value of each trial", f"{name} of each trial", _history(complete, name, direction)))
    if any(each.params for each in complete):
        plots.append(("Value by parameter", f"{name} by the values of each parameter", _slices(complete, name)))
    can_estimate = len(complete) >= _LEAST_COMPLETE
    has_optuna = find_spec("optuna") is not None
    if can_estimate and has_optuna and (importances := _importances(store, key, study, len(found))):
        text = ", ".join(f"{name} {value:.0%}" for name, value in importances)
        data = {"kind": "bars", "names": [each[0] for each in importances], "values": [each[1] for each in importances]}
        plots.append(("Importance of the parameters (PED-ANOVA)", text, data))
    install = can_estimate and not has_optuna and pip_install("tune")
    best = [*reversed(found)] if direction is None else best_first(found, direction)
    return {"best": best[:_MOST_TRIALS], "plots": plots, "install": install}


def _history(complete: Sequence[Ended], name: str, direction: Direction | None) -> dict[str, Any]:
    """Return the data of the plot of the values, with the best value so far if the direction is known."""
    best: list[Ended] = []
    if direction is not None:
        best = [*itertools.accumulate(complete, lambda *two: best_first(two, direction)[0])]
    return {
        "kind": "history",
        "metric": name,
        "x": [each.number for each in complete],
        "y": [finite(each.value) for each in complete],
        "best": [finite(each.value) for each in best],
    }


def _slices(complete: Sequence[Ended], name: str) -> dict[str, Any]:
    """Return the data of the plots of the values by each parameter."""
    names = list(dict.fromkeys(param for each in complete for param in each.params))[:_MOST_PARAMS]
    params = []
    for param in names:
        having = [each for each in complete if param in each.params]
        values = [each.params[param] for each in having]
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        params.append(
            {
                "name": param,
                "x": values if is_number else [str(value) for value in values],
                "y": [finite(each.value) for each in having],
                "numbers": [each.number for each in having],
            }
        )
    return {"kind": "slices", "metric": name, "params": params}


@lru_cache(maxsize=64)
def _importances(store: Store, key: Key, study: int, _ended: int) -> tuple[tuple[str, float], ...]:
    """Return the importance of each parameter, the largest first; empty if it cannot be estimated."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    try:
        with warnings.catch_warnings(action="ignore"):  # PED-ANOVA is experimental in some versions
            found = get_param_importances(copy_of(store, key, study), evaluator=PedAnovaImportanceEvaluator())
    except (ShoalError, ValueError, RuntimeError, ZeroDivisionError):
        return ()  # such as for one parameter with one value
    return tuple((name, value) for name, value in found.items() if math.isfinite(value))


_MOST_LINES = 50
"""Number of partitions that the page shows. `shoal many list` shows all."""

_READ_EVERY_S = 10.0
"""Seconds after which the result files of a running job are read again. There are up to a thousand of them."""


def partitions_view(job: Job, result: JobResult | None, location: str | None) -> dict[str, Any] | None:
    """Return the partitions of an attempt; None if it has none, or if their files are not on this machine.

    Returns:
        counts: Number of partitions that have ended, by status.
        total: Number of all partitions that have ended.
        worst: Those that failed, then the slowest, at most 50, with the text of the key as key.
    """
    if job.framework != PARTITIONS or (location is not None and "://" in location):
        return None
    return _partitions(job.id, job.attempt, 0 if result else int(time.monotonic() // _READ_EVERY_S))


@lru_cache(maxsize=80)
def _partitions(job_id: str, attempt: int, _turn: int) -> dict[str, Any] | None:
    try:
        found = jobs.partitions_so_far(job_id, attempt=attempt)
        if not len(found):
            return None
        worst = sorted(found, key=lambda each: (each.status == "succeeded", -each.seconds))[:_MOST_LINES]
        shown = [replace(each, key=shown_key(each.key)) for each in worst]
        return {"counts": found.counts, "total": len(found), "worst": shown}
    except (OSError, ValueError, ShoalError):
        return None  # the files were removed, or are on another host


_LOG_BYTES = 32_768
"""Number of bytes at the end of a job's log that the page shows."""

_LOG_LINES = 200

_MOST_POINTS = 2_000
"""Largest number of points of a curve."""


def job_view(
    store: Store,
    line: JobLine,
    points: Sequence[MetricPoint],
    logs: BackgroundReader[tuple[str, str | None]],
    now: float,
) -> dict[str, Any]:
    """Return the contents of the page about a job's attempt, by the names that its template uses.

    Returns:
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
    job = attempts.load(store, line.key)
    facts, tracking_uri, location = _settings(job.spec)
    log, problem = _log(store, line, logs)
    result, trained = JobStatus.of(job).result, None
    # The paths are in rows that users of another store can write.
    if result and is_own_store() and not (result.skipped or location) and result.model_path.startswith("/"):
        trained = _read_report(result.model_dump_json())
    found = [
        RunLinks(store).link(line.holder, line.task_key),
        mlflow_run_link(tracking_uri, line.mlflow_run_id),
        model_link(tracking_uri, facts["model"], result.model_version if result else None)
        if "model" in facts
        else None,
    ]
    return {
        "line": line,
        "result": result,
        "facts": facts,
        "phases": phases_of(line, now),
        "workers": trained.workers if trained else (),
        "partitions": partitions_view(job, result, location) if is_own_store() else None,
        "trials": trials_view(store, line.key, job, result),
        "curves": _curves(job.framework, points),
        "log": log,
        "log_problem": problem,
        "links": [link for link in found if link is not None],
    }


def phases_of(line: JobLine, now: float) -> list[dict[str, Any]]:
    """Return the phases of an attempt (waiting for room, starting and running) with their durations. `start` and
    `share` are percentages of the attempt's whole time."""
    end = line.ended_at or now
    admitted = line.admitted_at or (line.started_at if line.queued_at else line.queued_at) or end
    bounds = [
        ("waiting for room", line.queued_at or line.created_at, admitted if line.queued_at else line.created_at),
        ("starting", line.admitted_at or (None if is_waiting(line) else line.created_at), line.started_at or end),
        ("running", line.started_at, end),
    ]
    parts = [(name, max(0.0, until - since)) for name, since, until in bounds if since is not None]
    whole = sum(seconds for _, seconds in parts) or 1.0
    found: list[dict[str, Any]] = []
    start = 0.0
    for name, seconds in parts:
        share = 100 * seconds / whole
        found.append({"name": name, "seconds": seconds, "start": start, "share": share})
        start += share
    return found


def _settings(document: Mapping[str, Any]) -> tuple[dict[str, str], str | None, str | None]:
    """Return three parts of a spec: the main settings by name, the MLflow tracking URI, and the artifact location."""
    try:
        spec = jobs.parse_spec(dict(document))
    except ShoalError:  # this version cannot read the spec, because a newer version of shoal has written it
        return {}, None, None
    facts = {"framework": spec.framework}
    if rounds := getattr(spec, "n_estimators", None):
        facts["n estimators"] = str(rounds)
    if spec.register_as is not None:
        facts["model"] = spec.register_as.model
    datasets = [path for dataset in spec.datasets() for path in dataset.paths or ()]
    if datasets:
        facts["data"] = redact(datasets[0]) + (f" and {len(datasets) - 1} more" if len(datasets) > 1 else "")
    tracking = spec.tracking.uri if spec.tracking else None
    return facts, tracking, spec.run_config.artifact_location


def _curves(framework: str, points: Sequence[MetricPoint]) -> dict[str, Any] | None:
    """Return the data for the plot of metrics, each curve with at most 2,000 of its points, evenly chosen, and the last
    one. None if there are no metrics."""
    unit, found = curves(points, framework)
    series = []
    for name, curve in found.items():
        chosen = curve[:: -(-len(curve) // _MOST_POINTS)]
        if chosen[-1] is not curve[-1]:
            chosen = [*chosen, curve[-1]]
        series.append({"name": name, "x": [step for step, _ in chosen], "y": [finite(value) for _, value in chosen]})
    return {"kind": "curves", "unit": unit, "series": series} if series else None


@lru_cache(maxsize=64)
def _read_report(result: str) -> TrainResult | None:
    """Return the report of a finished boosting training; None if the report's file is not on this host."""
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
