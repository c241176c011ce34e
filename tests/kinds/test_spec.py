"""What every kind of spec does with its datasets, its code and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs.kind import parse_spec
from shoal.jobs.spec import AnyJobSpec


def rows(name: str) -> dict[str, Any]:
    return {"paths": [f"/{name}.parquet"]}


TRAINING = {"dataset": rows("train"), "input_cols": ["a"], "label_col": "y"}
GATE = {"model": "m", "metric": "rmse", "holdout": rows("gate")}

SPECS: list[tuple[dict[str, Any], list[str]]] = [
    (
        {**TRAINING, "eval_set": {"b": rows("b"), "a": rows("a")}, "user_code": "/code", "register": GATE},
        ["train", "b", "a", "gate"],
    ),
    (
        {
            "framework": "pytorch",
            "dataset_map": {"train": rows("train"), "more": rows("more")},
            "program": "/code",
            "register": {**GATE, "label_col": "y"},
        },
        ["train", "more", "gate"],
    ),
    ({"framework": "predict", "model": "models:/m/1", "dataset": rows("new"), "output_path": "/out"}, ["new"]),
    ({"framework": "partitions", "dataset": rows("sales"), "by": ["store"], "program": "/code"}, ["sales"]),
    (
        {
            "framework": "tune",
            "train": TRAINING,
            "holdout": rows("held-out"),
            "space": {"max_depth": [2, 3]},
            "program": "/code",
            "user_code": "/code",
            "register": GATE,
        },
        ["train", "held-out", "gate"],
    ),
    ({"framework": "tune", "dataset_map": {"x": rows("x")}, "program": "/code"}, ["x"]),
]


def named(spec: AnyJobSpec) -> list[str]:
    return [path.removeprefix("/").removesuffix(".parquet") for each in spec.datasets() for path in each.paths]


def moved_to(folder: str) -> Callable[[DatasetSpec], DatasetSpec]:
    """Return a function that moves a dataset with one file into a folder."""
    return lambda dataset: dataset.model_copy(update={"paths": (folder + dataset.paths[0].rpartition("/")[2],)})


@pytest.mark.parametrize(("fields", "datasets"), SPECS)
def test_a_spec_finds_and_replaces_its_datasets_and_compares_its_code_by_value(
    fields: dict[str, Any], datasets: list[str]
) -> None:
    spec = parse_spec(fields)
    assert named(spec) == datasets
    assert list(spec.inputs()) == list(spec.datasets())[: len(datasets) - ("register" in fields)]
    assert spec.demand().inputs == tuple(spec.inputs())
    moved = spec.with_datasets(moved_to("/moved/"))
    assert named(moved) == [f"moved/{name}" for name in datasets] and named(spec) == datasets
    assert moved.with_datasets(moved_to("/")) == spec == parse_spec(spec.document())
    code = {name: "by value" for name, value in fields.items() if value == "/code"}
    assert spec.comparable(lambda dataset: dataset).document() == {**spec.document(), **code}
