"""The rules of a promotion, as values: no registry, no model."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.data.spec import DatasetSpec
from shoal.jobs import Register
from shoal.jobs.mlflow.promotion_decision import (
    Baseline,
    Candidate,
    Evaluation,
    Slice,
    alias_moved,
    decide,
    is_better,
    strongest,
)

NAN, INF = float("nan"), float("inf")
FLIGHTS = {"AA": Slice(50, 10.0), "UA": Slice(40, 20.0), "HA": Slice(3, 1.0)}


def rules(**options: Any) -> Register:
    return Register(**{"model": "m", "metric": "rmse", "holdout": DatasetSpec(paths=("/x",)), **options})


def candidate(version: str, value: float, overlap: int | None = 0, **slices: float) -> Candidate:
    changed = {name: Slice(each.rows, slices.get(name, each.value)) for name, each in FLIGHTS.items()}
    return Candidate(version, Evaluation(value, {"rmse": value}, changed, overlap))


@pytest.mark.parametrize(
    ("challenger", "champion", "mode", "wins"),
    [
        (1.0, None, "min", True),
        (1.0, 2.0, "min", True),
        (2.0, 1.0, "min", False),
        (2.0, 1.0, "max", True),
        (1.0, 2.0, "max", False),
        (1.0, 1.0, "min", False),
        (1.0, 1.0, "max", False),
        (NAN, None, "min", False),
        (NAN, 1.0, "max", False),
        (1.0, NAN, "min", True),
    ],
)
def test_only_a_strictly_better_metric_is_better(challenger, champion, mode, wins):
    assert is_better(challenger, champion, mode) is wins


BY_CARRIER = {"by": "carrier", "slice_tolerance": 1.0}
SEEN = candidate("1", 0.1, overlap=200)


@pytest.mark.parametrize(
    ("options", "challenger", "champion", "baseline", "reason", "sentence"),
    [
        ({}, 5.0, None, 9.0, "first", "is the first champion, better than the baseline (rmse=9)"),
        ({}, 5.0, None, None, "first", "is the first champion"),
        (
            {},
            9.0,
            None,
            9.0,
            "baseline_not_beaten",
            "is not promoted: it does not beat the baseline, which always predicts the mean (rmse=9)",
        ),
        ({}, 9.5, candidate("1", 10.0), 9.0, "better", "replaces champion version 1 (rmse=10)"),
        ({}, 5.0, candidate("1", 4.0), 9.0, "champion_not_beaten", "does not beat champion version 1 (rmse=4)"),
        (
            {},
            5.0,
            candidate("1", 5.0),
            9.0,
            "champion_not_beaten",
            "does not beat champion version 1 (rmse=5): both are equal",
        ),
        ({}, NAN, None, 9.0, "metric_not_finite", "is not promoted: its rmse is not a finite number"),
        ({}, INF, candidate("1", 4.0), 9.0, "metric_not_finite", "is not promoted: its rmse is not a finite number"),
        (
            {},
            5.0,
            candidate("1", NAN),
            9.0,
            "champion_not_comparable",
            "replaces champion version 1 (rmse=nan), whose metric is not a finite number, better than the baseline "
            "(rmse=9)",
        ),
        (
            {"must_reach": 4.5},
            5.0,
            candidate("1", 6.0),
            9.0,
            "bound_missed",
            "is not promoted: its rmse has to be at most must_reach=4.5",
        ),
        ({"must_reach": 5.0}, 5.0, None, 9.0, "first", "is the first champion, better than the baseline (rmse=9)"),
        (
            {"metric": "auc", "must_reach": 0.8},
            0.7,
            None,
            0.5,
            "bound_missed",
            "is not promoted: its auc has to be at least must_reach=0.8",
        ),
        (
            {"min_improvement": 1.0},
            5.5,
            candidate("1", 6.0),
            9.0,
            "champion_not_beaten",
            "does not replace champion version 1 (rmse=6): an improvement of 0.5 is less than min_improvement=1",
        ),
        ({"min_improvement": 1.0}, 5.0, candidate("1", 6.0), 9.0, "better", "replaces champion version 1 (rmse=6)"),
        (  # 0.9 - 0.8 is 0.09999999999999998
            {"metric": "accuracy", "min_improvement": 0.1},
            0.9,
            candidate("1", 0.8),
            0.5,
            "better",
            "replaces champion version 1 (accuracy=0.8)",
        ),
        (
            {},
            5.0,
            SEEN,
            9.0,
            "champion_not_comparable",
            "replaces champion version 1 (rmse=0.1), which was trained on 200 rows of the holdout and is not compared, "
            "better than the baseline (rmse=9)",
        ),
        (
            {},
            9.5,
            SEEN,
            9.0,
            "baseline_not_beaten",
            "is not promoted: it does not beat the baseline, which always predicts the mean (rmse=9)",
        ),
        ({}, 5.0, candidate("1", 6.0, overlap=None), 9.0, "better", "replaces champion version 1 (rmse=6)"),
        (
            {},
            candidate("2", 0.2, overlap=1),
            SEEN,
            9.0,
            "champion_not_beaten",
            "does not beat champion version 1 (rmse=0.1), although it was trained on 1 row of the holdout",
        ),
        (
            BY_CARRIER,
            candidate("2", 5.0, AA=11.5, UA=23.0, HA=99.0),
            candidate("1", 6.0),
            9.0,
            "slice_worse",
            "does not replace champion version 1 (rmse=6): rmse is 23 instead of 20 where carrier is UA, and in 1 "
            "other slice, more than slice_tolerance=1 allows",
        ),
        (
            BY_CARRIER,
            candidate("2", 5.0, AA=11.0, UA=NAN, HA=99.0),
            candidate("1", 6.0),
            9.0,
            "better",
            "replaces champion version 1 (rmse=6)",
        ),
        (  # 0.4 - 0.3 is 0.10000000000000003
            {"by": "carrier", "slice_tolerance": 0.1},
            candidate("2", 5.0, AA=0.4),
            candidate("1", 6.0, AA=0.3),
            9.0,
            "better",
            "replaces champion version 1 (rmse=6)",
        ),
        (  # 100.4 - 100.3 is 0.10000000000000853
            {"by": "carrier", "slice_tolerance": 0.1},
            candidate("2", 5.0, AA=100.4),
            candidate("1", 6.0, AA=100.3),
            9.0,
            "better",
            "replaces champion version 1 (rmse=6)",
        ),
        (
            {"by": "carrier", "slice_tolerance": 0.0},
            candidate("2", 5.0, AA=0.4),
            candidate("1", 6.0, AA=0.4 - 1e-15),
            9.0,
            "slice_worse",
            "does not replace champion version 1 (rmse=6): rmse is 0.4 instead of 0.4 where carrier is AA, more than "
            "slice_tolerance=0 allows",
        ),
        (
            {"by": "carrier"},
            candidate("2", 5.0, AA=99.0),
            candidate("1", 6.0),
            9.0,
            "better",
            "replaces champion version 1 (rmse=6)",
        ),
    ],
)
def test_decisions_and_their_sentences(options, challenger, champion, baseline, reason, sentence):
    register = rules(**options)
    mine = challenger if isinstance(challenger, Candidate) else candidate("2", challenger)

    decision = decide(register, mine, champion, None if baseline is None else Baseline("mean", baseline))

    assert (decision.reason, decision.promote) == (
        reason,
        reason in ("first", "better", "champion_not_comparable"),
    )
    assert decision.sentence == f"m version 2 ({register.metric}={mine.value:.6g}) {sentence}"


def test_a_comparable_rival_counts_before_a_better_one_that_has_seen_the_holdout():
    honest, better = candidate("3", 0.5), candidate("4", 0.4)

    assert strongest([SEEN, honest, better], candidate("2", 1.0), "min") == better
    assert strongest([honest, SEEN], candidate("2", 1.0), "min") == honest
    assert strongest([SEEN], candidate("2", 1.0), "min") == SEEN
    assert strongest([SEEN, honest], candidate("2", 1.0, overlap=5), "min") == SEEN
    assert strongest([], candidate("2", 1.0), "min") is None


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (
            "7",
            "m version 2 (rmse=1) is not promoted: a person has moved the alias champion to version 7 during the "
            "promotion",
        ),
        (None, "m version 2 (rmse=1) is not promoted: a person has removed the alias champion during the promotion"),
    ],
)
def test_an_alias_that_a_person_has_moved(version, sentence):
    decision = alias_moved(rules(), candidate("2", 1.0), version)

    assert (decision.promote, decision.reason, decision.sentence) == (False, "alias_moved", sentence)
