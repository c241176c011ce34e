"""Report the comparison of a new model with the champion, in the job's log and in files of the MLflow run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from shoal.jobs.mlflow_run import Run
from shoal.jobs.register import Register
from shoal.jobs.results import DecisionResult, strict
from shoal.models import decision as decisions
from shoal.models.holdout import Holdout
from shoal.state.schema import Promotion

FOLDER = "shoal"
"""Folder in the MLflow run's artifacts to which ``promotion.json`` and ``promotion.md`` are written."""

_PROMOTION_COLUMNS = {
    "at": "promoted at",
    "version": "version",
    "previous": "instead of",
    "metric": "metric",
    "value": "value",
    "job_id": "job",
}
"""Columns of the table of earlier promotions, by their keys in the report."""


def build(
    register: Register,
    decision: DecisionResult,
    challenger: decisions.Candidate,
    champion: decisions.Candidate | None,
    baseline: decisions.Baseline | None,
    holdout: Holdout,
    promotions: Sequence[Promotion],
) -> dict[str, Any]:
    """Build the report of a comparison of models, as plain data for JSON."""
    rules = (
        "metric",
        "must_reach",
        "min_improvement",
        "by",
        "slice_tolerance",
        "min_slice_rows",
        "overlap",
        "late_run",
    )
    unseen, common = champion and champion.unseen, champion and champion.common
    theirs = None if champion is None else champion.evaluation
    mine = common.challenger if common else challenger.evaluation
    decided = champion is not None and decisions.compared(challenger, champion)[0] is mine
    return {
        "model": register.model,
        "alias": register.alias,
        "decision": {"promoted": decision.promoted, "reason": decision.reason, "sentence": decision.sentence},
        "rules": {name: getattr(register, name) for name in rules},
        "holdout": {"rows": len(holdout.labels), "digest": holdout.connector.digest()},
        "challenger": _candidate(challenger),
        "champion": None if champion is None else _candidate(champion),
        "baseline": None if baseline is None else {"kind": baseline.kind, register.metric: baseline.value},
        "slices": _slices(register, mine, theirs, decided),
        "common": common and theirs and _common(common, theirs),
        "unseen": unseen and _unseen(register, unseen),
        "promotions": [
            {
                "at": datetime.fromtimestamp(each.created_at, UTC).isoformat(timespec="seconds"),
                **{name: getattr(each, name) for name in _PROMOTION_COLUMNS if name != "at"},
            }
            for each in promotions
        ],
    }


def markdown(report: dict[str, Any]) -> str:
    """Render a report as Markdown tables, which are readable as plain text too."""
    parts = [report["decision"]["sentence"], _version_table(report), _slice_table(report, report["slices"])]
    if report["unseen"]:
        parts.append(_slice_table(report, report["unseen"]["slices"], "on rows that neither was trained on"))
    promotions = [[each[key] for key in _PROMOTION_COLUMNS] for each in report["promotions"]]
    parts.append(_table([*_PROMOTION_COLUMNS.values()], promotions))
    return "\n\n".join(filter(None, parts))


def _version_table(report: dict[str, Any]) -> str:
    """Return the table of the challenger, the champion and the baseline with their metrics."""
    challenger, champion, metric = report["challenger"], report["champion"], report["rules"]["metric"]
    versions = [("challenger", challenger), *([("champion", champion)] if champion else [])]
    names = list(challenger["metrics"])
    rows = [
        [role, each["version"], *(each["metrics"].get(name) for name in names), each["overlap"]]
        for role, each in versions
    ]
    if baseline := report["baseline"]:
        rows.append([f"baseline ({baseline['kind']})", None, baseline[metric], *[None] * len(names)])
    for part, overlap in (("common", None), ("unseen", 0)):
        if found := report[part]:
            on = f"on {found['rows']} of {report['holdout']['rows']} rows"
            rows += [
                [f"{role} {on}", each["version"], *(found[role].get(name) for name in names), overlap]
                for role, each in versions
            ]
    return _table(["", "version", *names, "holdout rows trained on"], rows)


def _slice_table(report: dict[str, Any], slices: Sequence[dict[str, Any]], note: str = "") -> str:
    """Return the table of the metric of each slice; empty if there are no slices."""
    metric = report["rules"]["metric"]
    header = [report["rules"]["by"], "rows", f"challenger {metric}", f"champion {metric}", note]
    keys = ("slice", "rows", "challenger", "champion", "note")
    return _table(header, [[each[key] for key in keys] for each in slices])


def store(run: Run, report: dict[str, Any]) -> None:
    """Store a report in the MLflow run, as the files ``shoal/promotion.json`` and ``shoal/promotion.md``."""
    run.client.log_text(run.run_id, json.dumps(strict(report), indent=2), f"{FOLDER}/promotion.json")
    run.client.log_text(run.run_id, markdown(report) + "\n", f"{FOLDER}/promotion.md")


def _candidate(candidate: decisions.Candidate) -> dict[str, Any]:
    overlap, period = candidate.evaluation.overlap, candidate.evaluation.period
    return {
        "version": candidate.version.number,
        "metrics": dict(candidate.evaluation.metrics),
        "overlap": "unknown" if overlap is None else f"same time: {period}" if period and not overlap else overlap,
    }


def _unseen(register: Register, unseen: decisions.UnseenRows) -> dict[str, Any]:
    return {
        "rows": unseen.rows,
        "needed": unseen.needed,
        "challenger": dict(unseen.challenger.metrics),
        "champion": dict(unseen.champion.metrics),
        "slices": _slices(register, unseen.challenger, unseen.champion, unseen.enough),
    }


def _common(common: decisions.CommonKeys, champion: decisions.Evaluation) -> dict[str, Any]:
    return {
        "rows": common.rows,
        "challenger": dict(common.challenger.metrics),
        "champion": dict(champion.metrics),
        "other_keys": dict(common.others),
    }


def _slices(
    register: Register, challenger: decisions.Evaluation, champion: decisions.Evaluation | None, decided: bool
) -> list[dict[str, Any]]:
    """Return the metrics by slice; `decided` says whether the slices of these rows affected the decision."""
    theirs = {} if champion is None else champion.slices
    fallen = decisions.worse_slices(register, challenger, champion) if champion is not None and decided else ()
    found = []
    for name, mine in challenger.slices.items():
        few = register.slice_tolerance is not None and mine.rows < register.min_slice_rows
        note = "worse" if name in fallen else "too few rows to decide" if few else ""
        value = theirs[name].value if name in theirs else None
        found.append({"slice": name, "rows": mine.rows, "challenger": mine.value, "champion": value, "note": note})
    return found


def _table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown; empty if there are no rows."""
    if not rows:
        return ""
    cells = [
        [" ".join(decisions.figure(value).replace("|", "\\|").split()) for value in row] for row in (header, *rows)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
