"""Decide whether a challenger (newly trained model) replaces the champion (registered version with the alias).

The functions only compute, and do not use MLflow or the store.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.jobs.metrics.evaluation import Mode
from shoal.jobs.results import Reason
from shoal.jobs.specs.register import Register


@dataclass(frozen=True)
class Slice:
    """Metric of a model on one slice of the holdout. A slice is the rows with the same value in the column that `by`
    names.

    Attributes:
        rows: Number of rows.
        value: Metric of the model on these rows; NaN where it is not defined.
    """

    rows: int
    value: float


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on the holdout (the rows that are kept for the comparison).

    Attributes:
        value: Value of the metric that decides.
        metrics: Values of all metrics that are reported, by name, including the metric that decides.
        slices: The deciding metric of each slice, by the slice's name.
        overlap: Number of the holdout's rows that the model was trained on; None if that is not known.
        period: Time range of training rows that overlaps with the holdout's time range, as text; None if no time ranges
            overlap.
    """

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    slices: Mapping[str, Slice] = field(default_factory=dict)
    overlap: int | None = None
    period: str | None = None

    @property
    def overlaps(self) -> bool:
        """Return whether training rows of the model are in the holdout, or are from the same period as the holdout."""
        return bool(self.overlap) or self.period is not None


@dataclass(frozen=True)
class Candidate:
    """A registered version of a model, with the metrics that the version reaches on the holdout."""

    version: str
    evaluation: Evaluation

    @property
    def value(self) -> float:
        """Return the version's value of `Register.metric`, the metric that decides the comparison."""
        return self.evaluation.value


@dataclass(frozen=True)
class Baseline:
    """A constant prediction with its metric. A challenger must beat this metric if there is no champion for a
    comparison.

    Attributes:
        kind: Kind of the constant: "mean", "median" or "majority".
        value: Metric that the constant prediction reaches on the holdout.
    """

    kind: str
    value: float


@dataclass(frozen=True)
class Decision:
    """Result of `decide`: whether a challenger (newly trained model) becomes the champion, and why.

    Attributes:
        promote: Whether the challenger becomes the champion.
        reason: Name of the rule that decided.
        sentence: The decision in one sentence, for people.
    """

    promote: bool
    reason: Reason
    sentence: str


def is_better(challenger: float, champion: float | None, mode: Mode) -> bool:
    """Return whether the challenger's metric is strictly better than the champion's.

    NaN is never better than a number, and any number is better than NaN.

    Args:
        challenger: The challenger's metric.
        champion: The champion's metric on the same data; None if there is no champion.
        mode: "min" if a lower metric is better, "max" if a higher one is.
    """
    if math.isnan(challenger):
        return False
    if champion is None or math.isnan(champion):
        return True
    return challenger < champion if mode == "min" else challenger > champion


def improvement(challenger: float, champion: float, mode: Mode) -> float:
    """Return the difference by which the challenger's metric is better than the champion's; negative if it is worse."""
    return champion - challenger if mode == "min" else challenger - champion


def comparable(champion: Candidate, challenger: Candidate) -> bool:
    """Return whether the metrics of champion and challenger can be compared fairly.

    The comparison is not fair if the champion's metric is not finite. The comparison is also not fair if the champion
    was trained on rows of the holdout or from the same period, and the challenger was not: such a champion has a better
    metric on the holdout than on new rows.
    """
    if not math.isfinite(champion.value):
        return False
    return not champion.evaluation.overlaps or challenger.evaluation.overlaps


def strongest(rivals: Iterable[Candidate], challenger: Candidate, mode: Mode) -> Candidate | None:
    """Return the best of the registered versions that a challenger has to beat; None if there is no such version.

    A version whose metric can be compared (see `comparable`) is preferred to a version whose metric cannot be compared.

    Args:
        rivals: The versions.
        challenger: The new version.
        mode: "min" if a lower metric is better, "max" if a higher one is.
    """
    best: Candidate | None = None
    for rival in rivals:
        if best is None:
            best = rival
        elif comparable(rival, challenger) != comparable(best, challenger):
            best = rival if comparable(rival, challenger) else best
        elif is_better(rival.value, best.value, mode):
            best = rival
    return best


def decide(
    register: Register, challenger: Candidate, champion: Candidate | None, baseline: Baseline | None
) -> Decision:
    """Decide whether a challenger replaces the champion, by the rules in `register`.

    The challenger's metric must be finite and must reach `must_reach`. If the champion's metric can be compared (see
    `comparable`), the challenger must be strictly better than the champion, by `min_improvement` or more, and on no
    slice worse by more than `slice_tolerance`. If the champion's metric cannot be compared, or there is no champion,
    the challenger must beat the baseline.

    Args:
        register: The rules.
        challenger: The new version.
        champion: Version that has the alias; None if there is none.
        baseline: Constant prediction to beat; None if the rules ask for no baseline.
    """
    name, metric, mode = f"{register.model} version {challenger.version}", register.metric, register.best
    mine = f"{metric}={_figure(challenger.value)}"
    flagged = _overlap_note(challenger, "it was trained on")

    def refused(reason: Reason, why: str) -> Decision:
        return Decision(False, reason, f"{name} ({mine}) {why}{flagged}")

    def promoted(reason: Reason, why: str) -> Decision:
        return Decision(True, reason, f"{name} ({mine}) {why}{flagged}")

    if not math.isfinite(challenger.value):
        return refused("metric_not_finite", f"is not promoted: its {metric} is not a finite number")
    if register.must_reach is not None and is_better(register.must_reach, challenger.value, mode):
        bound = f"at {'most' if mode == 'min' else 'least'} must_reach={register.must_reach:.6g}"
        return refused("bound_missed", f"is not promoted: its {metric} has to be {bound}")
    if champion is None or not comparable(champion, challenger):
        if baseline is not None and not is_better(challenger.value, baseline.value, mode):
            constant = f"always predicts {_CONSTANTS[baseline.kind]} ({metric}={_figure(baseline.value)})"
            return refused("baseline_not_beaten", f"is not promoted: it does not beat the baseline, which {constant}")
        beats = "" if baseline is None else f", better than the baseline ({metric}={_figure(baseline.value)})"
        if champion is None:
            return promoted("first", f"is the first {register.alias}{beats}")
        against = f"version {champion.version} ({metric}={_figure(champion.value)})"
        why = "whose metric is not a finite number"
        if math.isfinite(champion.value):
            why = f"which was trained on {_overlap_text(champion.evaluation)} and is not compared"
        return promoted("champion_not_comparable", f"replaces {register.alias} {against}, {why}{beats}")
    against = f"{register.alias} version {champion.version} ({metric}={_figure(champion.value)})"
    gain = improvement(challenger.value, champion.value, mode)
    if gain <= 0:
        why = ": both are equal" if gain == 0 else ""
        return refused("champion_not_beaten", f"does not beat {against}{why}")
    if gain < register.min_improvement and not _equal(gain, register.min_improvement, champion.value):
        least = f"{gain:.6g} is less than min_improvement={register.min_improvement:.6g}"
        return refused("champion_not_beaten", f"does not replace {against}: an improvement of {least}")
    if fallen := worse_slices(register, challenger.evaluation, champion.evaluation):
        first, *others = fallen
        before, after = (_figure(each.evaluation.slices[first].value) for each in (champion, challenger))
        more = f", and in {len(others)} other slice{'s' if len(others) > 1 else ''}" if others else ""
        allowed = f"more than slice_tolerance={register.slice_tolerance:.6g} allows"
        worse = f"{metric} is {after} instead of {before} where {register.by} is {first}{more}"
        return refused("slice_worse", f"does not replace {against}: {worse}, {allowed}")
    return promoted("better", f"replaces {against}{_overlap_note(champion, 'which was trained on')}")


def alias_moved(register: Register, challenger: Candidate, version: str | None) -> Decision:
    """Return the decision that a challenger is not promoted, because a person moved the alias during the promotion.

    Args:
        register: The rules, with the names of the model and the alias.
        challenger: The new version.
        version: Version that the alias points to now; None if the person removed the alias.
    """
    name = f"{register.model} version {challenger.version} ({register.metric}={_figure(challenger.value)})"
    alias = f"the alias {register.alias}"
    moved = f"removed {alias}" if version is None else f"moved {alias} to version {version}"
    return Decision(False, "alias_moved", f"{name} is not promoted: a person has {moved} during the promotion")


def champion_unread(register: Register, challenger: Candidate, version: str, why: str) -> Decision:
    """Return the decision that a challenger is not promoted, because the champion cannot be evaluated.

    Args:
        register: The rules, with the names of the model and the alias.
        challenger: The new version.
        version: Version of the champion.
        why: The error, with what to do.
    """
    name = f"{register.model} version {challenger.version} ({register.metric}={_figure(challenger.value)})"
    kept = f"is not promoted, because {register.alias} version {version} could not be compared"
    return Decision(False, "champion_unread", f"{name} {kept}: {why}")


def worse_slices(register: Register, challenger: Evaluation, champion: Evaluation) -> list[str]:
    """Return the names of the slices on which the challenger is worse than the champion by more than `slice_tolerance`.

    The slice with the largest loss comes first. Slices with fewer rows than `min_slice_rows` are left out.

    Args:
        register: The rules, with `slice_tolerance` and `min_slice_rows`.
        challenger: The challenger's metrics.
        champion: The champion's metrics.
    """
    if register.slice_tolerance is None:
        return []
    losses = {
        name: -improvement(mine.value, champion.slices[name].value, register.best)
        for name, mine in challenger.slices.items()
        if name in champion.slices and mine.rows >= register.min_slice_rows
    }
    allowed = register.slice_tolerance
    fallen = [
        name
        for name, loss in losses.items()
        if loss > allowed and not _equal(loss, allowed, champion.slices[name].value)
    ]
    return sorted(fallen, key=lambda name: -losses[name])


def _equal(difference: float, bound: float, value: float) -> bool:
    """Return whether the difference of two metrics is equal to a bound, except for a rounding error.

    For example, 0.9 - 0.8 is a little less than 0.1. The rounding error depends on the size of the metrics themselves.

    Args:
        difference: Difference of the metrics.
        bound: The bound. A bound of 0 always gives False, because the difference of two equal metrics is exactly 0.
        value: One of the two metrics.
    """
    return bound > 0 and math.isclose(difference, bound, rel_tol=1e-9, abs_tol=_ROUNDING * abs(value))


_ROUNDING = 4 * sys.float_info.epsilon
"""Largest rounding error of the difference of two metrics, relative to one of the metrics. The bound includes the
rounding errors of the metrics themselves."""

_CONSTANTS = {"mean": "the mean", "median": "the median", "majority": "the most frequent class"}


def _figure(value: float) -> str:
    return f"{value:.6g}"


def _overlap_text(evaluation: Evaluation) -> str:
    """Describe the overlap of training rows and holdout: the number of shared rows, or the shared period."""
    if not evaluation.overlap:
        return f"rows of the holdout's time ({evaluation.period})"
    return f"{evaluation.overlap} row{'' if evaluation.overlap == 1 else 's'} of the holdout"


def _overlap_note(candidate: Candidate, begin: str) -> str:
    return f", although {begin} {_overlap_text(candidate.evaluation)}" if candidate.evaluation.overlaps else ""
