"""Entrance: what a job is asked to do, as a file or an operator's arguments say it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal import RunConfig
from shoal.distributors.lightgbm import LightGBMScalingConfig
from shoal.distributors.pytorch import PyTorchScalingConfig, WorkerResourceConfig
from shoal.distributors.xgboost import XGBScalingConfig
from shoal.errors import InvalidArgumentError
from shoal.jobs import FunctionJobSpec, JobSpec, parse_spec, spec_of
from shoal.jobs.submission import fingerprint
from tests.entrances.conftest import refusals
from tests.entrances.wrong_values import SECRET, documents, many, nested, numbers, texts, urls

BOOSTING: dict[str, Any] = {
    "dataset": {"paths": ["/data/x.parquet"], "splits": [{"weights": [1, 2], "index": 0, "seed": 1}]},
    "input_cols": ["a", "b"],
    "label_col": "y",
    "eval_set": {"late": {"paths": ["/data/y.parquet"]}},
    "params": {"eta": 0.1, "nested": {"list": [1, "two", None]}},
    "n_estimators": 10,
    "early_stopping_rounds": 3,
    "verbose_eval": 2,
    "scaling_config": {"num_workers": 2},
    "run_config": {"job_id": "mine", "seed": 7, "timeout": 5, "orphan_after": 60, "artifact_location": "/tmp/x"},
    "tracking": {"uri": "http://host/", "experiment": "e", "tags": {"k": "v"}},
    "register": {"model": "m", "metric": "rmse", "holdout": {"paths": ["/data/z.parquet"]}},
}
FUNCTION: dict[str, Any] = {
    "framework": "pytorch",
    "train_func": "package.module:train",
    "args": [1, "a"],
    "kwargs": {"b": None},
    "dataset_map": {"train": {"paths": ["/data/x.parquet"], "sharded": True}},
    "hyper_params": {"rate": 0.1},
    "scaling_config": {"num_nodes": 2},
    "run_config": {"max_restarts": 1},
}


def _places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, item in items for found in _places(item, (*place, key)))]


def _changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = _changed(value[place[0]], place[1:], new)
    return copy


odd_values = st.one_of(documents, texts, numbers, urls())


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """A good spec with one value changed, and perhaps a field too many."""
    good = draw(st.sampled_from([BOOSTING, FUNCTION]))
    spec = _changed(good, draw(st.sampled_from(_places(good)[1:])), draw(odd_values))
    if draw(st.booleans()):
        spec = {**spec, draw(texts): draw(odd_values)}
    return spec


@many
@given(fields=specs())
def test_specs(fields: dict[str, Any]):
    with refusals():
        spec = parse_spec(fields)
        document = spec.document()
        written = json.dumps(document)
        assert json.dumps(parse_spec(json.loads(written)).document()) == written
        assert fingerprint(spec)


@many
@given(fields=st.dictionaries(texts, documents, max_size=3), kind=st.sampled_from([JobSpec, FunctionJobSpec]))
def test_anything_for_a_spec(fields: dict[str, Any], kind: type[JobSpec | FunctionJobSpec]):
    with refusals():
        kind.parse(fields)
        pytest.fail("a spec has fields that are required")


@many
@example(fields=None, framework=None, train_func="\ud800", args=[], kwargs={})
@example(fields=None, framework=None, train_func="a\0b", args=[], kwargs={})
@given(
    fields=st.one_of(st.none(), st.dictionaries(texts, documents, max_size=2)),
    framework=st.one_of(st.none(), texts),
    train_func=st.one_of(st.none(), texts, documents),
    args=st.lists(documents, max_size=2),
    kwargs=st.dictionaries(texts, documents, max_size=2),
)
def test_arguments_of_a_task(nothing_left, fields: Any, framework: Any, train_func: Any, args: Any, kwargs: Any):
    with refusals():
        spec_of(fields, framework=framework, train_func=train_func, args=args, kwargs=kwargs)
    nothing_left()


CONFIGS = [RunConfig, XGBScalingConfig, LightGBMScalingConfig, PyTorchScalingConfig, WorkerResourceConfig]


@many
@given(data=st.data(), kind=st.sampled_from(CONFIGS))
def test_configs(data: st.DataObject, kind: Any):
    options = data.draw(
        st.dictionaries(st.sampled_from([*kind.model_fields, "x"]), st.one_of(odd_values, st.none()), max_size=3)
    )
    with refusals():
        kind(**options)


def test_the_error_of_a_config_repeats_no_password():
    with refusals():
        WorkerResourceConfig(num_cpus=1, gpu_type=f"http://user:{SECRET}@host")
        pytest.fail("a type of GPU was given, and no GPU")


@pytest.mark.parametrize("field", ["n_estimators", "early_stopping_rounds"])
def test_a_number_of_rounds_is_no_truth_value(field: str):
    with pytest.raises(InvalidArgumentError, match=f"{field}=True: must be a number, not True or False"):
        JobSpec.parse({**BOOSTING, field: True})


@pytest.mark.parametrize(
    "value", [nested(150), nested(5000), 10**5000], ids=["150 levels", "5000 levels", "5000 digits"]
)
def test_what_no_json_document_holds_is_refused(value: Any):
    with pytest.raises(InvalidArgumentError, match=r"levels deep|more than 4000 digits"):
        JobSpec.parse({**BOOSTING, "params": {"x": value}})


@many
@given(uri=urls())
def test_the_errors_of_specs_made_in_python_repeat_no_password(uri: str):
    with refusals(ValueError):
        JobSpec(**{**BOOSTING, "tracking": {"uri": uri, "experiment": ""}})
    with refusals(ValueError):
        JobSpec(**{**BOOSTING, "dataset": uri})
