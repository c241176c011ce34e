"""Models, metrics and best rounds of several workers are those of the plain library in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import conformance
from tests.support.conformance import NOISE, Case, Shape
from tests.support.two_node_cluster import TwoNodes

QUICK = [
    case
    for case in conformance.CASES
    if str(case)
    in (
        "xgboost rare class, stops by aucpr",
        "xgboost weights and auc",
        "xgboost softprob",
        "xgboost quantile 0.9",
        "xgboost ndcg",
        "lightgbm time stamps",
        "lightgbm rare class, stops by average precision",
        "lightgbm tweedie",
        "lightgbm quantile 0.9",
        "lightgbm lambdarank",
    )
]
"""One case of each kind that was wrong once."""


@pytest.mark.ray
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_two_workers_train_the_plain_model_on_sorted_rows(driver: TwoNodes, case: Case, tmp_path: Path) -> None:
    found = conformance.compared(case, Shape("label", 1), 2, tmp_path)
    assert not found.problems(case), found


def test_each_bound_above_the_noise_has_a_reason() -> None:
    assert len(QUICK) == 10
    assert not [str(case) for case in conformance.CASES if case.bound > NOISE and not (case.reason or case.quality)]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_all_cases_with_one_to_three_workers() -> None:
    subprocess.run([sys.executable, "-m", "tests.support.conformance"], check=True)
