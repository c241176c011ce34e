"""Plans of sizes: which number of nodes a training needs, and what the plan reads for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data.parquet.source import ParquetSource
from shoal.errors import CapacityError, DataError
from shoal.pool.spec import PoolSpec
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.training_plan import plan_training
from shoal.training.sizing.node_memory import NodeMemory, node_memory
from tests.support.two_node_cluster import COLUMNS

MIB = 2**20


@pytest.fixture
def request_of(rows: Path) -> Callable[..., TrainRequest]:
    def make(**fields: Any) -> TrainRequest:
        return TrainRequest.model_validate(
            {"dataset": {"paths": [str(rows)]}, "input_cols": COLUMNS, "label_col": "y", **fields}
        )

    return make


def own(mib: int) -> NodeMemory:
    return NodeMemory(mib * MIB, is_shared=False, source="a test")


def test_the_smallest_size_with_a_reserve_is_chosen_from_footers_alone(
    request_of: Callable[..., TrainRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParquetSource, "read", lambda *_: pytest.fail("the plan has read rows"))
    plan = plan_training(request_of(), own(400), cpus=1, most_nodes=6)
    assert [size.nodes for size in plan.sizes] == [1, 2, 4, 6]
    assert [size.rows for size in plan.sizes] == [6_000, 3_000, 1_500, 1_000]
    assert plan.chosen is plan.sizes[0]
    assert plan.chosen.verdict == "fits"
    idle = plan.chosen.terms["idle process"]
    need = round((plan.chosen.peak_bytes + 0.15 * idle) / MIB) + 2
    assert plan_training(request_of(), own(need), cpus=1, most_nodes=1).sizes[0].verdict == "tight"
    doubled = plan_training(request_of(), own(2 * need), cpus=1, most_nodes=1, scale=2.0)
    assert doubled.sizes[0].verdict == "tight"


def test_what_fits_on_no_size_says_what_it_needs(request_of: Callable[..., TrainRequest]) -> None:
    plan = plan_training(request_of(framework="lightgbm"), own(100), cpus=1, most_nodes=2)
    assert plan.chosen is None
    assert {size.verdict for size in plan.sizes} == {"no"}
    assert "fits on no size up to 2 node(s)" in plan.reasoning()
    assert "or XGBEstimator, which can train from disk" in plan.reasoning()
    with pytest.raises(CapacityError):
        plan_training(request_of(scaling_config={"num_workers": 8}), own(100), cpus=1, most_nodes=2)


def test_more_workers_than_rows_are_refused(request_of: Callable[..., TrainRequest], tmp_path: Path) -> None:
    pq.write_table(pa.table({name: [0.0, 1.0] for name in [*COLUMNS, "y"]}), tmp_path / "a.parquet")
    request = request_of(dataset={"paths": [str(tmp_path)]}, scaling_config={"num_workers": 3, "num_cpu_per_worker": 1})
    with pytest.raises(DataError, match="use fewer workers"):
        plan_training(request, own(400), cpus=16, most_nodes=1)


def test_nodes_of_one_machine_share_its_memory(request_of: Callable[..., TrainRequest]) -> None:
    node = NodeMemory(800 * MIB, is_shared=True, source="a test")
    plan = plan_training(request_of(), node, cpus=1, most_nodes=4)
    assert [size.room_bytes // MIB for size in plan.sizes] == [800, 400, 200]


@pytest.mark.parametrize(
    ("uri", "reported", "mib"),
    [
        ("kuberay://ns/a?image=shoal:1&memory_per_node=16Gi&object_store_mb=1000", 0, 16 * 1024 - 700 - 954),
        ("ray://a?address=http://127.0.0.1:8265", 3 * MIB, 3),
        ("ray://a?address=http://127.0.0.1:8265", 0, None),
    ],
)
def test_a_pool_knows_the_memory_of_its_nodes(uri: str, reported: int, mib: int | None) -> None:
    found = node_memory(PoolSpec.parse(uri), reported)
    assert (None if found is None else round(found.usable_bytes / MIB)) == mib
    assert found is None or not found.is_shared
