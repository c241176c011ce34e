"""How a wrong option is reported, whatever it is an option of."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from shoal import PoolSpec, RunConfig
from shoal.errors import InvalidArgumentError
from shoal.jobs import FunctionJobSpec, JobSpec
from shoal.option_validation import Settings, later_option

TRAIN = {"dataset": {"paths": ["/data"]}, "input_cols": ["a"], "label_col": "y"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_colss": ["a"]}, 'unknown option "input_colss": did you mean input_cols?'),
        ({"run_config": {"max_restart": 1}}, 'unknown option "run_config.max_restart": did you mean max_restarts?'),
        ({"eval_set": {"eval": {"path": "/x"}}}, 'unknown option "eval_set.eval.path": did you mean paths?'),
        (
            {"framework": "xgbost"},
            "unknown framework \"xgbost\": it can be 'xgboost' or 'lightgbm'; did you mean xgboost?",
        ),
        ({"dataset": ["/data"]}, "dataset=['/data']: must be a dict with the fields of a DatasetSpec"),
        ({"max_depth": 4}, "; parameters of the library belong in params"),
        ({"label_col": None}, "label_col=None: Input should be a valid string"),
        ({"n_estimators": 0}, "n_estimators=0: Input should be greater than or equal to 1"),
        (
            {"weight_col": "a"},
            "a column may have only one role (feature, label, bound, weight, margin or group), but these columns have "
            "more than one: a",
        ),
    ],
)
def test_a_wrong_option_is_named_with_its_path_and_the_nearest_name(fields: dict, said: str):
    for build in (lambda: JobSpec(**{**TRAIN, **fields}), lambda: JobSpec.parse({**TRAIN, **fields})):
        with pytest.raises(InvalidArgumentError) as caught:
            build()
        assert said in str(caught.value)


def is_known(value: object) -> bool:
    return "?" not in str(value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_colss": ["?"]}, 'unknown option "input_colss": did you mean input_cols?'),
        ({"label_col": "?", "n_estimators": 0}, "n_estimators=0: Input should be greater than or equal to 1"),
        ({"run_config": {"max_restart": "?"}}, 'unknown option "run_config.max_restart": did you mean max_restarts?'),
        ({"n_estimators": "?", "eval_set": {"e": {}}}, "eval_set.e={}: the dataset has neither paths nor sql"),
        ({"n_estimators": "?", "early_stopping_rounds": 5}, None),  # needs an eval_set
        ({"label_col": "?", "weight_col": "a"}, None),  # a feature is also the weight
        ({"dataset": {"paths": "?"}, "params": {"eta": "?"}, "verbose_eval": "?", "framework": "?"}, None),
        ({"run_config": {"tracking": {"tag": "?"}}}, None),  # moved to the field tracking
    ],
)
def test_options_that_are_not_known_yet_are_not_checked(fields: dict, said: str | None):
    with pytest.raises(InvalidArgumentError) if said else nullcontext() as caught:
        JobSpec.check({**TRAIN, **fields}, is_known)
    assert not said or said in str(caught.value)


def test_a_model_of_a_union_is_checked_when_all_its_values_are_known():
    """Which of the two scaling configs is meant is not certain before."""
    FunctionJobSpec.check({"train_func": "m:f", "scaling_config": {"num_nodes": "?"}}, is_known)
    with pytest.raises(InvalidArgumentError, match="num_nodez"):
        FunctionJobSpec.check({"train_func": "m:f", "scaling_config": {"num_nodez": 1}, "args": ["?"]}, is_known)


def test_a_missing_option_is_named():
    with pytest.raises(
        InvalidArgumentError, match=r"^dataset is missing; input_cols is missing; label_col is missing$"
    ):
        JobSpec()


def test_values_are_shown_without_credentials():
    with pytest.raises(InvalidArgumentError) as caught:
        RunConfig(timeout="s3://bucket/x?token=hunter2", seed=-1)
    assert "hunter2" not in str(caught.value)
    assert "seed=-1: Input should be greater than or equal to 0" in str(caught.value)


def test_a_text_that_utf_8_cannot_encode_is_refused():
    with pytest.raises(InvalidArgumentError) as caught:
        PoolSpec(name="\udc80")
    assert str(caught.value) == (
        "an option contains a character that cannot be encoded in UTF-8; remove it: "
        r"'utf-8' codec can't encode character '\udc80' in position 1: surrogates not allowed"
    )


def test_an_option_that_was_added_later_leaves_stored_specs_as_they_were():
    class Newer(Settings):
        known: int = 1
        added: int | None = later_option("Added later.")

    assert Newer().model_dump(mode="json") == {"known": 1}
    assert Newer(added=2).model_dump(mode="json") == {"known": 1, "added": 2}
