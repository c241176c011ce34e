"""Decide whether a challenger (newly trained model) replaces the champion (registered version with the alias).

The functions only compute, and do not use MLflow or the store.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from shoal.jobs.register import Register
from shoal.jobs.results import WAITING, DecisionResult, Reason
from shoal.kinds.partitions.keys import some_keys
from shoal.models.metrics import Mode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.models.registry import VersionId

MIN_UNSEEN_ROWS = 100
"""Number of rows, which neither model was trained on, that are enough to compare two models. With 100 rows, the
standard error of an RMSE is about 7 % (1 / sqrt(2 n), for normally distributed errors)."""


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
class Predictions:
    """Predictions of a model for the rows of the holdout.

    Attributes:
        values: Predictions ``[rows]`` or ``[rows, outputs]``, in the order of the rows.
        gives_classes: Whether they are class numbers; None if that is not known.
        unknown: Whether the model has no prediction for a row, because it has models of partitions and none for the
            row's key, ``[rows]``; None if it has one for each row.
        unknown_keys: Number of rows of each such key, as text.
    """

    values: np.ndarray
    gives_classes: bool | None
    unknown: NDArray[np.bool_] | None = None
    unknown_keys: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on the holdout (the rows that are kept for the comparison). A model of partitions is
    measured on the rows whose keys it knows.

    Attributes:
        value: Value of the metric that decides.
        metrics: Values of all metrics that are reported, by name, including the metric that decides.
        slices: The deciding metric of each slice, by the slice's name.
        overlap: Number of the holdout's rows that the model was trained on; None if that is not known.
        period: Time range of training rows that overlaps with the holdout's time range, as text; None if no time ranges
            overlap.
        predictions: The model's predictions for the holdout's rows, in their order; None if they are not known.
    """

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    slices: Mapping[str, Slice] = field(default_factory=dict)
    overlap: int | None = None
    period: str | None = None
    predictions: Predictions | None = field(default=None, repr=False, compare=False)

    @property
    def overlaps(self) -> bool:
        """Return whether training rows of the model are in the holdout, or are from the same period as the holdout."""
        return bool(self.overlap) or self.period is not None


@dataclass(frozen=True)
class UnseenRows:
    """Metrics of champion and challenger on the rows of the holdout that neither of them was trained on.

    Attributes:
        rows: Number of these rows.
        holdout_rows: Number of all rows of the holdout.
        challenger: The challenger's metrics on these rows; NaN if they are not defined.
        champion: The champion's metrics on these rows.
    """

    rows: int
    holdout_rows: int
    challenger: Evaluation
    champion: Evaluation

    @property
    def needed(self) -> int:
        """Return the number of rows that a comparison needs: :data:`MIN_UNSEEN_ROWS`, but at most half of the holdout's
        rows, because a small holdout decides, too."""
        return min(MIN_UNSEEN_ROWS, -(-self.holdout_rows // 2))

    @property
    def enough(self) -> bool:
        """Return whether the models can be compared on these rows."""
        values = (self.challenger.value, self.champion.value)
        return self.rows >= self.needed and all(map(math.isfinite, values))


@dataclass(frozen=True)
class CommonKeys:
    """The rows of the holdout for whose keys champion and challenger have a model, if there are others. Only these rows
    are compared: a metric on rows that one of them does not predict says nothing about the other.

    Attributes:
        rows: Number of these rows.
        holdout_rows: Number of all rows of the holdout.
        challenger: The challenger's metrics on these rows; NaN if they are not defined. The champion's are those of its
            `Candidate`.
        others: Number of rows of each key that is not compared, as text.
    """

    rows: int
    holdout_rows: int
    challenger: Evaluation
    others: Mapping[str, int]


@dataclass(frozen=True)
class Recency:
    """Comparison of the latest times in the training rows of champion and challenger.

    Attributes:
        column: Name of the time column.
        champion: Latest time in the champion's training rows, as text.
        challenger: Latest time in the challenger's training rows; the latest time in the holdout if they have no time
            column.
        order: 1 if the champion's training rows end later, -1 if they end earlier, 0 if both ends are equal.
        of_holdout: Whether `challenger` is the latest time in the holdout.
    """

    column: str
    champion: str
    challenger: str
    order: int
    of_holdout: bool = False

    def __str__(self) -> str:
        other = "the holdout" if self.of_holdout else "this version"
        rows = "newer rows" if self.order > 0 else "rows that are as new"
        return f"{rows} ({self.column} until {self.champion}, {other} until {self.challenger})"


@dataclass(frozen=True)
class Candidate:
    """A registered version of a model, with the metrics that the version reaches on the holdout.

    Attributes:
        version: The version.
        evaluation: Metrics on all rows of the holdout; for a champion with `common`, only on these rows.
        common: For a champion: the rows of the keys that both know; None if both know the keys of all rows.
        unseen: For a champion: comparison with the challenger on the rows that neither was trained on; None if neither
            is known to be trained on rows of the holdout.
        recency: For a champion: whether its training rows are newer than the challenger's; None if that is not known.
    """

    version: VersionId
    evaluation: Evaluation
    unseen: UnseenRows | None = None
    common: CommonKeys | None = None
    recency: Recency | None = None

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


def is_better(challenger: float, champion: float | None, mode: Mode) -> bool:
    """Return whether the challenger's metric is strictly better than the champion's.

    NaN is never better than a number, and any number is better than NaN.
    """
    if math.isnan(challenger):
        return False
    return champion is None or math.isnan(champion) or improvement(challenger, champion, mode) > 0


def improvement(challenger: float, champion: float, mode: Mode) -> float:
    """Return the difference by which the challenger's metric is better than the champion's; negative if it is worse."""
    return champion - challenger if mode == "min" else challenger - champion


Rule = Literal["compare", "keep", "baseline"]
"""compare: the better metric wins. keep: the champion stays. baseline: the challenger must beat the baseline."""


def rule(register: Register, challenger: Candidate, champion: Candidate) -> Rule:
    """Return the rule that decides between a challenger and a champion.

    The metrics of a model are better on rows that it was trained on than on new rows. So the models are compared on the
    rows of the holdout that neither was trained on. If these rows are too few, the champion stays if its training rows
    are at least as new as the challenger's: such a challenger comes from a late run, for example of an older interval.
    An older champion, or one whose training rows have no time column, loses to a challenger that beats the baseline,
    because otherwise no challenger could ever replace it.

    A challenger that may be trained on rows of the holdout (``overlap="flag"``) is compared on all rows if the unseen
    rows are too few.

    A champion stays if the two know no key in common, or if the metric is not defined on the rows of these keys, but
    not if only its own metric there is not a finite number.
    """
    if _lacks_common_rows(champion):
        return "keep"
    if not math.isfinite(champion.value):
        return "baseline"
    order = -1 if champion.recency is None else champion.recency.order
    if register.late_run == "keep" and order > 0:
        return "keep"
    if champion.unseen is None or champion.unseen.enough or challenger.evaluation.overlaps:
        return "compare"
    return "keep" if order >= 0 and register.late_run != "replace" else "baseline"


def _lacks_common_rows(champion: Candidate) -> bool:
    """Return whether there are no rows on which a version of partitions can be compared with the champion."""
    return champion.common is not None and not math.isfinite(champion.common.challenger.value)


def compared(challenger: Candidate, champion: Candidate) -> tuple[Evaluation, Evaluation]:
    """Return the metrics of challenger and champion on the rows that decide a comparison: on the rows that neither was
    trained on if these are enough, otherwise on all rows; in both cases only on those whose keys both know."""
    if champion.unseen is not None and champion.unseen.enough:
        return champion.unseen.challenger, champion.unseen.champion
    return challenger.evaluation if champion.common is None else champion.common.challenger, champion.evaluation


def strongest(rivals: Iterable[Candidate], challenger: Candidate, register: Register) -> Candidate | None:
    """Return the registered version that a challenger has to beat; None if there is no such version.

    A version that stays without a comparison (see `rule`) comes first, then the versions that can be compared, then all
    others. Of several versions, the one with the best metric is returned. Compared versions are measured by the
    difference to the challenger's metric, because each of them may be compared on other rows.
    """

    def strength(rival: Candidate) -> tuple[int, bool, float]:
        # A metric that is not a number is the weakest.
        found = rule(register, challenger, rival)
        value = improvement(rival.value, 0.0, register.best)
        if found == "compare":
            mine, theirs = compared(challenger, rival)
            value = improvement(theirs.value, mine.value, register.best)
        return -_STRENGTH.index(found), not math.isnan(value), value

    return max(rivals, key=strength, default=None)


def decide(
    register: Register, challenger: Candidate, champion: Candidate | None, baseline: Baseline | None
) -> DecisionResult:
    """Decide whether a challenger replaces the champion, by the rules in `register`.

    The challenger's metric on all rows of the holdout must be finite and must reach `must_reach`. If the two can be
    compared (see `rule`), the challenger must be strictly better than the champion, by `min_improvement` or more, and
    on no slice worse by more than `slice_tolerance`, all of this on the compared rows. If they cannot be compared, a
    champion that is at least as new stays. In all other cases the challenger must beat the baseline on all rows.
    """
    name, metric, mode = f"{register.model} version {challenger.version}", register.metric, register.best
    note = ""
    if challenger.evaluation.overlaps:
        note = f", although it was trained on {_overlap_text(challenger.evaluation)}"

    unknown = _unknown_text(challenger.evaluation, champion)

    def decided(reason: Reason, why: str) -> DecisionResult:
        return _decided(register, challenger, reason, f"{why}{note}{unknown}")

    if not math.isfinite(challenger.value):
        predicted = challenger.evaluation.predictions
        if predicted is not None and predicted.unknown is not None and predicted.unknown.all():
            sentence = f"{name} is not promoted: no key of the holdout has a model{unknown}"
            return DecisionResult(reason="metric_not_finite", sentence=sentence)
        return decided("metric_not_finite", f"is not promoted: its {metric} is not a finite number")
    if register.must_reach is not None and is_better(register.must_reach, challenger.value, mode):
        bound = f"at {'most' if mode == 'min' else 'least'} must_reach={register.must_reach:.6g}"
        return decided("bound_missed", f"is not promoted: its {metric} has to be {bound}")
    applied = "baseline" if champion is None else rule(register, challenger, champion)
    if champion is not None and _lacks_common_rows(champion):
        return decided("no_common_keys", f"is not promoted: {_why_no_common_rows(register, champion)}")
    if champion is not None and applied == "keep":
        return decided("champion_newer", f"is not promoted: {_why_kept(register, champion)}")
    if champion is None or applied == "baseline":
        if baseline is not None and not is_better(challenger.value, baseline.value, mode):
            constant = f"always predicts {_CONSTANTS[baseline.kind]} ({metric}={figure(baseline.value)})"
            return decided("baseline_not_beaten", f"is not promoted: it does not beat the baseline, which {constant}")
        beats = "" if baseline is None else f", better than the baseline ({metric}={figure(baseline.value)})"
        if champion is None:
            return decided("first", f"is the first {register.alias}{beats}")
        against = f"version {champion.version} ({metric}={figure(champion.value)})"
        why = "whose metric is not a finite number"
        if math.isfinite(champion.value):
            why = f"which was trained on {_overlap_text(champion.evaluation)} and is not compared"
        return decided("champion_not_comparable", f"replaces {register.alias} {against}, {why}{beats}")
    if champion.unseen is not None and champion.unseen.enough:
        note = f", on {_rows(champion.unseen)}"
    mine, theirs = compared(challenger, champion)
    challenger, champion = replace(challenger, evaluation=mine), replace(champion, evaluation=theirs)
    against = f"{register.alias} version {champion.version} ({metric}={figure(champion.value)})"
    gain = improvement(challenger.value, champion.value, mode)
    if gain <= 0:
        why = ": both are equal" if gain == 0 else ""
        return decided("champion_not_beaten", f"does not beat {against}{why}")
    if gain < register.min_improvement and not _equal(gain, register.min_improvement, champion.value):
        least = f"{gain:.6g} is less than min_improvement={register.min_improvement:.6g}"
        return decided("champion_not_beaten", f"does not replace {against}: an improvement of {least}")
    if fallen := worse_slices(register, challenger.evaluation, champion.evaluation):
        first, *others = fallen
        before, after = (figure(each.evaluation.slices[first].value) for each in (champion, challenger))
        more = f", and in {len(others)} other slice{'s' if len(others) > 1 else ''}" if others else ""
        allowed = f"more than slice_tolerance={register.slice_tolerance:.6g} allows"
        worse = f"{metric} is {after} instead of {before} where {register.by} is {first}{more}"
        return decided("slice_worse", f"does not replace {against}: {worse}, {allowed}")
    known = f", which was trained on {_overlap_text(champion.evaluation)}" if champion.evaluation.overlaps else ""
    return decided("better", f"replaces {against}{known}")


def _decided(register: Register, challenger: Candidate, reason: Reason, why: str) -> DecisionResult:
    named = f"{register.model} version {challenger.version} ({register.metric}={figure(challenger.value)})"
    return DecisionResult(reason=reason, sentence=f"{named} {why}")


def alias_moved(
    register: Register, challenger: Candidate, version: VersionId | None, when: str = "during"
) -> DecisionResult:
    """Return the decision that a challenger is not promoted, because a person moved the alias during or after the
    promotion."""
    alias = f"the alias {register.alias}"
    moved = f"removed {alias}" if version is None else f"moved {alias} to version {version}"
    why = f"is not promoted: a person has {moved} {when} the promotion"
    return _decided(register, challenger, "alias_moved", why)


def promoted_before(register: Register, challenger: Candidate, previous: str | None) -> DecisionResult:
    """Return the decision about a challenger that the store's records of promotions already name as promoted."""
    instead = "" if previous is None else f" instead of version {previous}"
    why = f"was promoted to {register.alias}{instead} before"
    return _decided(register, challenger, "first" if previous is None else "better", why)


def waiting(register: Register, challenger: Candidate, comparison: DecisionResult) -> DecisionResult:
    """Return the decision that a challenger waits until `promote_model` is called, with its comparison so far."""
    waits = f"waits for a decision, and the alias {register.alias} has not moved"
    return _decided(register, challenger, WAITING, f"{waits}. Comparison at its registration: {comparison.sentence}")


def champion_unread(register: Register, challenger: Candidate, version: VersionId, why: str) -> DecisionResult:
    """Return the decision that a challenger is not promoted, because the champion cannot be evaluated."""
    kept = f"is not promoted, because {register.alias} version {version} could not be compared"
    return _decided(register, challenger, "champion_unread", f"{kept}: {why}")


def worse_slices(register: Register, challenger: Evaluation, champion: Evaluation) -> list[str]:
    """Return the names of the slices on which the challenger is worse than the champion by more than `slice_tolerance`.

    The slice with the largest loss comes first. Slices with fewer rows than `min_slice_rows` are left out.
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
    """
    return bound > 0 and math.isclose(difference, bound, rel_tol=1e-9, abs_tol=_ROUNDING * abs(value))


_ROUNDING = 4 * sys.float_info.epsilon
"""Largest rounding error of the difference of two metrics, relative to one of them."""

_STRENGTH: tuple[Rule, ...] = ("keep", "compare", "baseline")
"""The rules, in the order in which :func:`strongest` prefers them."""

_CONSTANTS = {kind: f"the {kind}" for kind in ("mean", "median", "quantile")} | {"majority": "the most frequent class"}


def figure(value: object) -> str:
    """Return a metric, or another value of a table, as text for people."""
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _rows(unseen: UnseenRows) -> str:
    return f"{unseen.rows} of the holdout's {unseen.holdout_rows} rows, which neither was trained on"


def _why_kept(register: Register, champion: Candidate) -> str:
    """Return why a champion stays without a comparison."""
    version = f"{register.alias} version {champion.version} ({register.metric}={figure(champion.value)})"
    stays = f"{version} was trained on {champion.recency} and stays"
    unseen = champion.unseen
    if unseen is None or (register.late_run == "keep" and champion.recency is not None and champion.recency.order > 0):
        return f'{stays}, because late_run is "keep"'
    if unseen.rows >= unseen.needed:
        return f"{stays}, because {register.metric} is not defined on {_rows(unseen)}"
    new = f"{unseen.needed} rows that neither was trained on"
    return f"{stays}, because a comparison needs {new}, and the holdout has {unseen.rows}"


def _why_no_common_rows(register: Register, champion: Candidate) -> str:
    assert champion.common is not None
    stays = f"{register.alias} version {champion.version} stays, because"
    if not champion.common.rows:
        return f"{stays} no key of the holdout has a model in both"
    return f"{stays} {register.metric} is not defined on the {champion.common.rows} rows whose keys both know"


def _unknown_text(challenger: Evaluation, champion: Candidate | None) -> str:
    """Name the keys of the holdout that were left out, because the challenger or the champion has no model for them."""
    if champion is not None and champion.common is not None:
        common = champion.common
        left, on = common.others, f"on the {common.rows} of {common.holdout_rows} rows whose keys both know"
    else:
        known = challenger.predictions
        left, on = (known.unknown_keys if known else {}), "without the rows whose keys have no model"
    if not left:
        return ""
    return f"; measured {on}. Left out: key{'' if len(left) == 1 else 's'} {some_keys(left)}"


def _overlap_text(evaluation: Evaluation) -> str:
    """Describe the overlap of training rows and holdout: the number of shared rows, or the shared period."""
    if not evaluation.overlap:
        return f"rows of the holdout's time ({evaluation.period})"
    return f"{evaluation.overlap} row{'' if evaluation.overlap == 1 else 's'} of the holdout"
