"""Report on a trained model as a markdown artifact in Prefect: its metrics, their curves, the decision about its
promotion, and links."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from shoal.jobs import AnyJobSpec, JobResult
from shoal.links import Link, job_page, mlflow_run_link, model_link

if TYPE_CHECKING:
    from shoal.jobs.metrics.series import MetricPoint

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
