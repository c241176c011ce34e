from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.data import DataConnector, ShardedDataConnector
from shoal.errors import DataError, InvalidArgumentError, JobError
from shoal.jobs import FunctionJobSpec, JobSpec, parse_spec, spec_of
from shoal.jobs.submission import fingerprint
from shoal.kinds.function import driver as function_work
from shoal.kinds.function.driver import _program
from shoal.kinds.function.spec import FunctionRegister
from shoal.training.pytorch.request import PyTorchScalingConfig, SpreadScalingConfig

FUNCTION = "shoal.training.pytorch.context:get_context"
REGISTER = {"model": "net", "metric": "rmse", "holdout": {"paths": ["/x"]}, "label_col": "y"}


BOOSTING = {"dataset": {"paths": ["/x"]}, "input_cols": ["a"], "label_col": "y"}


def test_a_spec_is_told_by_its_framework() -> None:
    assert isinstance(parse_spec({"framework": "pytorch", "train_func": FUNCTION}), FunctionJobSpec)
    assert isinstance(parse_spec(BOOSTING), JobSpec)
    assert isinstance(parse_spec({**BOOSTING, "framework": "lightgbm"}), JobSpec)
    with pytest.raises(InvalidArgumentError, match="framework"):
        parse_spec({**BOOSTING, "framework": "keras"})


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        (BOOSTING, "xgboost: y"),
        ({**BOOSTING, "tracking": {"run_name": "2013-01"}}, "xgboost: y (2013-01)"),
        ({**BOOSTING, "register": {"model": "flights", "metric": "rmse", "holdout": {"paths": ["/h"]}}}, "flights"),
        ({"framework": "pytorch", "train_func": "pkg.module:train"}, "pkg.module:train"),
        (
            {"framework": "predict", "model": "models:/m/1", "dataset": {"paths": ["/x"]}, "output_path": "/out"},
            "predictions of models:/m/1",
        ),
    ],
)
def test_what_a_job_is_about(fields: dict[str, object], label: str) -> None:
    assert parse_spec(fields).label == label


def test_it_survives_its_row(tmp_path: Path) -> None:
    spec = FunctionJobSpec(
        train_func=FUNCTION,
        dataset_map={"train": ShardedDataConnector.from_parquet(tmp_path), "test": DataConnector.from_parquet("/x")},
        hyper_params={"rate": 0.1, "sizes": [1, 2]},
        scaling_config=SpreadScalingConfig(num_workers=3),
        register={**REGISTER, "input_cols": ["a"]},
    ).completed("retrain", {"MLFLOW_TRACKING_URI": "http://mlflow"})
    again = parse_spec(json.loads(json.dumps(spec.document())))
    assert again == spec
    assert again.run_config.pool_name == "retrain"
    assert [dataset.sharded for dataset in again.datasets()] == [True, False, False]
    assert parse_spec(FunctionJobSpec(train_func=FUNCTION).document()).scaling_config == PyTorchScalingConfig()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "give train_func .* exactly one of them"),
        ({"train_func": "train"}, 'train_func must look like pkg.module:name, not "train"'),
        ({"train_func": FUNCTION, "program": "/x"}, "give train_func .* exactly one of them"),
        ({"program": "/x", "args": [1]}, "args and kwargs can be given only with a function's name"),
        (
            {"train_func": FUNCTION, "register": {"model": "net", "metric": "rmse", "holdout": {"paths": ["/x"]}}},
            "label",
        ),
        ({"train_func": FUNCTION, "register": REGISTER, "tracking": None}, "register needs tracking"),
        ({"train_func": FUNCTION, "epochs": 3}, "epochs"),
        ({"train_func": FUNCTION, "run_config": {"job_id": "a/b"}}, "a/b"),
        ({"train_func": FUNCTION, "scaling_config": {"num_nodes": 0}}, "num_nodes"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        parse_spec({"framework": "pytorch", **fields})


def test_the_same_function_is_the_same_fingerprint_however_it_was_pickled() -> None:
    one, other = (FunctionJobSpec(name="train", program=f"/_code/{digest}") for digest in ("aa", "bb"))
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint(one) != fingerprint(one.model_copy(update={"hyper_params": {"rate": 1}}))


def test_the_lines_of_a_torch_distributor_are_stored_but_make_no_other_job() -> None:
    plain, lines = (FunctionJobSpec(program="/_code/aa", torch_distributor=mode) for mode in (None, "local"))
    assert parse_spec(lines.document()) == lines
    assert fingerprint(lines) == fingerprint(plain)


def test_other_arguments_are_another_fingerprint(tmp_path: Path) -> None:
    others = {"run_config": {"artifact_location": str(tmp_path)}}
    one, same, other = (spec_of(others, train_func=pow, args=[base, 2]) for base in (3, 3, 4))
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    assert spec_of(others, train_func=print, args=[object()]).arguments is None


def test_a_function_is_found_by_its_name_or_its_program(tmp_path: Path) -> None:
    import cloudpickle

    program = cloudpickle.loads(_program(FunctionJobSpec(train_func=FUNCTION)))
    assert program().get_rank() == 0
    with pytest.raises(InvalidArgumentError, match=r"train_func no_such_package:x cannot be imported: No module named"):
        _program(FunctionJobSpec(train_func="no_such_package:x"))
    with pytest.raises(InvalidArgumentError, match=r"pytorch.context:x cannot be imported: .*no attribute"):
        _program(FunctionJobSpec(train_func="shoal.training.pytorch.context:x"))
    with pytest.raises(JobError, match="cannot be read"):
        _program(FunctionJobSpec(program=str(tmp_path / "aa")))


def test_a_model_that_the_function_logged_enters_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    register = FunctionRegister(**REGISTER, input_cols=("a",))
    entered: list[tuple[tuple[object, ...], dict[str, object]]] = []
    monkeypatch.setattr(function_work.loading, "load", lambda uri, columns: f"model of {uri}, {columns[0]}")
    monkeypatch.setattr(
        function_work.gate, "enter", lambda *args, **kwargs: entered.append((args, kwargs)) or "outcome"
    )
    place = SimpleNamespace(name="attempt")
    run = SimpleNamespace(logged_model=lambda: "models:/m-1")
    assert function_work._register(register, place, run, [], None) == ("models:/m-1", "outcome")  # type: ignore[arg-type]
    given = {
        "model_uri": "models:/m-1",
        "model": "model of models:/m-1, a",
        "label_col": "y",
        "input_cols": ("a",),
        "group_col": None,
        "trained_on": [],
        "profile": None,
    }
    assert entered == [((place, run, register), given)]
    nothing = SimpleNamespace(logged_model=lambda: None)
    with pytest.raises(JobError, match='the training function logged no model, so no version of "net"'):
        function_work._register(register, place, nothing, [], None)  # type: ignore[arg-type]


def test_a_holdout_that_is_not_there_is_told_before_the_function_runs(tmp_path: Path) -> None:
    register = {**REGISTER, "holdout": {"paths": [str(tmp_path / "none.parquet")]}}
    spec = FunctionJobSpec(train_func=FUNCTION, register=register)
    with pytest.raises(DataError, match=r"none\.parquet"):
        function_work.FunctionDriver(spec).work(SimpleNamespace())  # type: ignore[arg-type]
