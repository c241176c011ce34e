"""What a library cannot train, or not in several workers, is refused by name before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.boosting.params import Unsupported, UserCode
from shoal.training.boosting.request import TrainRequest
from shoal.training.gang.placement import GangShape
from shoal.training.lightgbm.library import LightGBM
from shoal.training.xgboost.library import XGBoost
from tests.support import unsupported_table

ENGINES = {"xgboost": XGBoost(), "lightgbm": LightGBM()}
GIVEN: dict[str, Any] = {
    "updater": "grow_colmaker,prune",
    "lambdarank_unbiased": True,
    "linear_tree": True,
    "tree_learner": "feature",
    "interaction_constraints": [[0], [0, 1]],
    "forcedsplits_filename": "",
    "cegb_penalty_feature_lazy": [1.0, 2.0],
    "cegb_penalty_feature_coupled": [1.0, 2.0],
}
"""Values of the parameters of which every value is refused."""


def params(library: str, given: dict[str, Any], workers: int) -> dict[str, Any]:
    request = TrainRequest(
        framework=library,
        dataset={"paths": ("/none",)},
        input_cols=("a", "b"),
        label_col="y",
        group_col="q",
        params=given,
    )
    return ENGINES[library].params(request, GangShape(workers, 1), UserCode())[0]


ENTRIES = [(library, entry) for library, engine in ENGINES.items() for entry in engine.unsupported]


@pytest.mark.parametrize(("library", "entry"), ENTRIES, ids=lambda each: getattr(each, "name", each))
def test_each_entry_is_refused_by_name_with_its_remedy(library: str, entry: Unsupported, tmp_path: Any) -> None:
    file = tmp_path / "splits.json"
    file.write_text("{}")
    values = [value.replace("ams", "ams@0.15") for value in entry.values]
    rank = {"objective": "rank:ndcg"} if entry.name == "lambdarank_unbiased" else {}
    for value in values or (GIVEN[entry.name] or str(file),):
        for workers in (1, 2):
            if workers == 1 and entry.only_several_workers:
                assert params(library, {**rank, entry.name: value}, 1)[entry.name] == value
                continue
            with pytest.raises(InvalidArgumentError) as caught:
                params(library, {**rank, entry.name: value}, workers)
            assert all(part in str(caught.value) for part in (f"{entry.name}=", entry.reason, entry.remedy))


def test_other_values_and_other_names_of_a_parameter() -> None:
    assert params("xgboost", {"updater": "grow_quantile_histmaker", "tree_method": "auto"}, 2)
    assert params("lightgbm", {"monotone_constraints": [1, 0], "monotone_constraints_method": "basic"}, 2)
    assert params("lightgbm", {"interaction_constraints": [], "linear_tree": False, "tree_learner": "voting"}, 2)
    for workers in (1, 2):
        with pytest.raises(InvalidArgumentError, match='tree_learner="unknown" is not supported in shoal'):
            params("lightgbm", {"tree_learner": "unknown"}, workers)
    with pytest.raises(InvalidArgumentError, match=r'monotone_constraints_method="advanced" is not .* with 3 workers'):
        params("lightgbm", {"mc_method": "advanced"}, 3)
    with pytest.raises(InvalidArgumentError, match=r'eval_metric="ams@0\.15" is not supported with 2 workers'):
        params("xgboost", {"objective": "binary:logistic", "eval_metric": ["auc", "ams@0.15"]}, 2)


def test_leaves_that_are_means_of_the_workers_are_announced() -> None:
    assert ENGINES["xgboost"].inexact_leaves({"objective": "reg:squarederror"}, 2) is None
    assert ENGINES["lightgbm"].inexact_leaves({"objective": "quantile"}, 1) is None
    said = ENGINES["xgboost"].inexact_leaves({"objective": "reg:absoluteerror"}, 2)
    assert said and 'objective "reg:absoluteerror" with 2 workers: the value of a leaf is the mean' in said
    said = ENGINES["lightgbm"].inexact_leaves({"objective": "mae"}, 2)
    assert said and 'objective "regression_l1" with 2 workers' in said


def test_the_guide_contains_the_table() -> None:
    written = unsupported_table.PAGE.read_text()
    assert written == unsupported_table.page(), "run `python -m tests.support.unsupported_table`"


@pytest.mark.parametrize(
    ("library", "given", "said"),
    [
        ("xgboost", {"eval_metric": "aft-nloglik"}, 'eval_metric="aft-nloglik" with objective="reg:squarederror"'),
        ("lightgbm", {"metric": "multi_logloss"}, "Multiclass objective and metrics don't match"),
    ],
)
def test_a_metric_that_does_not_suit_the_objective_is_refused(library: str, given: dict[str, Any], said: str) -> None:
    request = TrainRequest(
        framework=library,
        dataset={"paths": ("/none",)},
        eval_set={"eval": {"paths": ("/other",)}},
        input_cols=("a", "b"),
        label_col="y",
        params=given,
    )
    with pytest.raises(TrainingError, match=said):
        ENGINES[library].params(request, GangShape(2, 1), UserCode())
