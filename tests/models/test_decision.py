"""The rules of a promotion, as values: no registry, no model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs import Register
from shoal.models.decision import (
    Baseline,
    Candidate,
    CommonKeys,
    Evaluation,
    Recency,
    Slice,
    UnseenRows,
    alias_moved,
    compared,
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


def seen_partly(
    champion: Candidate,
    value: float,
    mine: float = 1.0,
    *,
    rows: int,
    of: int = 200,
    order: int | None = None,
    **slices: Any,
) -> Candidate:
    """Return a champion with its own and the challenger's metric on the rows that neither was trained on."""
    days = {-1: "2024-01-01", 0: "2024-01-02", 1: "2024-01-03"}
    recency = None if order is None else Recency("day", days[order], "2024-01-02", order)
    theirs = candidate(champion.version, value).evaluation
    unseen = UnseenRows(rows, of, candidate("2", mine, **slices).evaluation, theirs)
    return replace(champion, unseen=unseen, recency=recency)


SEEN = seen_partly(candidate("1", 0.1, overlap=200), NAN, NAN, rows=0)


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
            5.0,
            seen_partly(candidate("1", 0.1, overlap=100), 7.0, 6.0, rows=100, order=1),
            9.0,
            "better",
            "replaces champion version 1 (rmse=7), on 100 of the holdout's 200 rows, which neither was trained on",
        ),
        (
            {},
            candidate("2", 5.0, overlap=30),
            seen_partly(candidate("1", 6.0, overlap=100), 6.5, 7.0, rows=100, order=1),
            9.0,
            "champion_not_beaten",
            "does not beat champion version 1 (rmse=6.5), on 100 of the holdout's 200 rows, which neither was trained "
            "on",
        ),
        (
            {"min_improvement": 2.0},
            4.0,
            seen_partly(candidate("1", 6.0, overlap=100), 6.5, 6.0, rows=100),
            9.0,
            "champion_not_beaten",
            "does not replace champion version 1 (rmse=6.5): an improvement of 0.5 is less than min_improvement=2, on "
            "100 of the holdout's 200 rows, which neither was trained on",
        ),
        (
            BY_CARRIER,
            candidate("2", 5.0),
            seen_partly(candidate("1", 6.0, overlap=100), 7.0, 6.0, rows=100, AA=11.5),
            9.0,
            "slice_worse",
            "does not replace champion version 1 (rmse=7): rmse is 11.5 instead of 10 where carrier is AA, more than "
            "slice_tolerance=1 allows, on 100 of the holdout's 200 rows, which neither was trained on",
        ),
        (  # the bound holds for all rows
            {"must_reach": 4.5},
            5.0,
            seen_partly(candidate("1", 0.1, overlap=100), 7.0, 4.0, rows=100),
            9.0,
            "bound_missed",
            "is not promoted: its rmse has to be at most must_reach=4.5",
        ),
        (  # the challenger is older
            {},
            5.0,
            seen_partly(candidate("1", 0.1, overlap=101), 7.0, 6.0, rows=99, order=1),
            9.0,
            "champion_newer",
            "is not promoted: champion version 1 (rmse=0.1) was trained on newer rows (day until 2024-01-03, this "
            "version until 2024-01-02) and stays, because a comparison needs 100 rows that neither was trained on, and "
            "the holdout has 99",
        ),
        (  # as new
            {},
            5.0,
            seen_partly(candidate("1", 0.1, overlap=200), NAN, NAN, rows=0, order=0),
            9.0,
            "champion_newer",
            "is not promoted: champion version 1 (rmse=0.1) was trained on rows that are as new (day until 2024-01-02, "
            "this version until 2024-01-02) and stays, because a comparison needs 100 rows that neither was trained "
            "on, and the holdout has 0",
        ),
        (  # the champion is older
            {},
            5.0,
            seen_partly(candidate("1", 0.1, overlap=101), 7.0, 6.0, rows=99, order=-1),
            9.0,
            "champion_not_comparable",
            "replaces champion version 1 (rmse=0.1), which was trained on 101 rows of the holdout and is not compared, "
            "better than the baseline (rmse=9)",
        ),
        (  # half of a small holdout is enough
            {},
            5.0,
            seen_partly(candidate("1", 0.1, overlap=3), 7.0, 6.0, rows=4, of=7, order=1),
            9.0,
            "better",
            "replaces champion version 1 (rmse=7), on 4 of the holdout's 7 rows, which neither was trained on",
        ),
        (  # such as the AUC, if these rows are all of one class
            {"metric": "auc"},
            0.9,
            seen_partly(candidate("1", 0.8, overlap=50), NAN, NAN, rows=150, order=1),
            0.5,
            "champion_newer",
            "is not promoted: champion version 1 (auc=0.8) was trained on newer rows (day until 2024-01-03, this "
            "version until 2024-01-02) and stays, because auc is not defined on 150 of the holdout's 200 rows, which "
            "neither was trained on",
        ),
        (
            {"late_run": "replace"},
            5.0,
            seen_partly(candidate("1", 0.1, overlap=200), NAN, NAN, rows=0, order=1),
            9.0,
            "champion_not_comparable",
            "replaces champion version 1 (rmse=0.1), which was trained on 200 rows of the holdout and is not compared, "
            "better than the baseline (rmse=9)",
        ),
        (
            {"late_run": "keep"},
            5.0,
            seen_partly(candidate("1", 6.0), 6.0, 5.0, rows=200, order=1),
            9.0,
            "champion_newer",
            "is not promoted: champion version 1 (rmse=6) was trained on newer rows (day until 2024-01-03, this "
            'version until 2024-01-02) and stays, because late_run is "keep"',
        ),
        (
            {"late_run": "keep"},
            5.0,
            seen_partly(candidate("1", 6.0), 6.0, 5.0, rows=200, order=0),
            9.0,
            "better",
            "replaces champion version 1 (rmse=6), on 200 of the holdout's 200 rows, which neither was trained on",
        ),
        (
            {},
            5.0,
            replace(candidate("1", 6.0), common=CommonKeys(5, 200, Evaluation(NAN), {"4": 194, "7": 1})),
            9.0,
            "no_common_keys",
            "is not promoted: champion version 1 stays, because rmse is not defined on the 5 rows whose keys both "
            "know; measured on the 5 of 200 rows whose keys both know. Left out: keys 4 (194 rows), 7 (1 row)",
        ),
        (
            {},
            5.0,
            replace(candidate("1", NAN), common=CommonKeys(199, 200, Evaluation(5.5), {"4": 1})),
            9.0,
            "champion_not_comparable",
            "replaces champion version 1 (rmse=nan), whose metric is not a finite number, better than the baseline "
            "(rmse=9); measured on the 199 of 200 rows whose keys both know. Left out: key 4 (1 row)",
        ),
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
    decided = mine if champion is None else Candidate("2", compared(mine, champion)[0])
    if decision.reason in (
        "no_common_keys",
        "bound_missed",
        "champion_newer",
        "champion_not_comparable",
        "baseline_not_beaten",
    ):
        decided = mine
    assert decision.sentence == f"m version 2 ({register.metric}={decided.value:.6g}) {sentence}"


def test_a_comparable_rival_counts_before_a_better_one_that_has_seen_the_holdout():
    honest, better = candidate("3", 0.5), candidate("4", 0.4)
    newer = seen_partly(candidate("6", 0.5, overlap=200), NAN, rows=0, order=1)

    assert strongest([SEEN, honest, better], candidate("2", 1.0), rules()) == better
    assert strongest([honest, SEEN], candidate("2", 1.0), rules()) == honest
    assert strongest([SEEN], candidate("2", 1.0), rules()) == SEEN
    assert strongest([SEEN, honest], candidate("2", 1.0, overlap=5), rules()) == SEEN
    assert strongest([newer, SEEN, honest], candidate("2", 1.0), rules()) == newer
    # The lead of 0.9 on the rows that neither was trained on counts, and not the champion's metric on all rows.
    partly = seen_partly(candidate("5", 0.6, overlap=100), 0.1, rows=100)
    assert strongest([better, partly], candidate("2", 1.0), rules()) == partly
    assert strongest([], candidate("2", 1.0), rules()) is None


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
