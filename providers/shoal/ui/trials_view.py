"""Build the table and the plots of a search's trials for its page."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from shoal.errors import ShoalError
from shoal.jobs.journal import study_logs
from shoal.jobs.journal.attempts import Key
from shoal.jobs.results import JobResult
from shoal.kinds.search import trials
from shoal.kinds.search.spec import TUNE
from shoal.kinds.search.study_storage import copy_of
from shoal.kinds.search.trials import Ended
from shoal.state import Store
from shoal.state.schema import Job
from shoal.ui.formats import finite

_MOST_TRIALS = 200
"""Largest number of trials in the table."""

_MOST_PARAMS = 8
"""Largest number of parameters of which the values are plotted."""

_LEAST_COMPLETE = 4
"""Number of trials with a value from which on importances are estimated. PED-ANOVA compares the best tenth, but at
least two trials, with the others."""


@dataclass(frozen=True)
class TrialsView:
    """The trials of a search that have ended.

    Attributes:
        best: The trials, the best first, at most 200.
        plots: Title, text in place of the picture, and data of each plot; empty if no trial has a value.
        lacks_optuna: Whether the importances of the parameters are missing, because Optuna is not installed here.
    """

    best: Sequence[Ended]
    plots: Sequence[tuple[str, str, Mapping[str, Any]]]
    lacks_optuna: bool


def trials_view(store: Store, key: Key, job: Job, result: JobResult | None) -> TrialsView | None:
    """Return the trials of a search; None if the job is no search, or no trial has ended."""
    if job.spec.get("framework") != TUNE:
        return None
    study = study_logs.study_of(store, key)
    found = trials.read(store, key.job_id, study)
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
    return TrialsView(_ordered(found, direction)[:_MOST_TRIALS], plots, can_estimate and not has_optuna)


def _ordered(found: Sequence[Ended], direction: str | None) -> list[Ended]:
    if direction is None:
        return [*reversed(found)]
    sign = -1 if direction == "maximize" else 1
    rank = {"complete": 0, "pruned": 1}
    return sorted(found, key=lambda each: (rank.get(each.state, 2), sign * (each.value or 0.0), each.number))


def _history(complete: Sequence[Ended], name: str, direction: str | None) -> dict[str, Any]:
    """Return the data of the plot of the values, with the best value so far if the direction is known."""
    best: list[float | None] = []
    for each in complete if direction else ():
        assert each.value is not None
        better = max if direction == "maximize" else min
        best.append(each.value if not best or best[-1] is None else better(best[-1], each.value))
    return {
        "kind": "history",
        "metric": name,
        "x": [each.number for each in complete],
        "y": [finite(each.value) for each in complete],
        "best": [finite(value) for value in best],
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
