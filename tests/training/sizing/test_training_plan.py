"""Plans of sizes: which number of nodes a training needs, and what the plan reads for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data.connector import DataConnector
from shoal.data.parquet.source import ParquetSource
from shoal.errors import CapacityError, DataError
from shoal.pool.spec import PoolSpec
from shoal.training.boosting.messages import Task
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.training_plan import Learned, plan_training
from shoal.training.boosting.worker_fit import WorkerFit
from shoal.training.boosting.worker_load import text_bytes
from shoal.training.host import memory
from shoal.training.sizing.node_memory import NodeMemory, node_memory
from shoal.training.sizing.worker_memory import WorkerMemory
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
    learned = Learned(idle + 100 * MIB, scale=2.0)
    above = round((plan.chosen.peak_bytes - idle) / MIB)
    more = plan_training(request_of(), own(need + 115 + above), cpus=1, most_nodes=1, learned=learned).sizes[0]
    assert (more.verdict, more.terms["idle process"]) == ("tight", idle + 100 * MIB)


def test_the_smallest_size_between_powers_of_two_is_found(
    request_of: Callable[..., TrainRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits_from_five(framework: str, task: Task, room: int, *, workers: int, **others: Any) -> WorkerFit:
        return WorkerFit(WorkerMemory(0, {"training": {"bins": 1}}), room if workers >= 5 else 0)

    monkeypatch.setattr("shoal.training.boosting.training_plan.fit_worker", fits_from_five)
    plan = plan_training(request_of(), own(400), cpus=1, most_nodes=11)
    assert plan.chosen is not None
    assert ([size.nodes for size in plan.sizes], plan.chosen.nodes) == ([1, 2, 4, 5, 6, 8, 11], 5)


LONG = "x" * 500


@pytest.mark.parametrize(("values", "size"), [([LONG, "y"], 250), (["x", "y"], 1), ([1, 2], 0)])
def test_texts_count_as_long_as_the_first_rows_show(values: list[Any], size: int, tmp_path: Path) -> None:
    """Footers show the size of the encoded texts: a few bytes a row here."""
    for name in "ab":
        table = pa.table({"x": values * 5_000, "y": [0, 1] * 5_000})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2_000)
    source = DataConnector.from_parquet(str(tmp_path)).source
    assert sum(group[1] for footer in source.footers() for group in footer.groups) < 20_000 * 20
    assert size <= text_bytes(source, ("x",)) <= size + 10
    fields = {"dataset": {"paths": [str(tmp_path)]}, "input_cols": ["x"], "label_col": "y", "categorical_cols": ["x"]}
    terms = plan_training(TrainRequest.model_validate(fields), own(400), cpus=1, most_nodes=1).sizes[0].terms
    assert terms.get("batch", 0) >= 2 * 2_000 * size or size < 100


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


def test_one_worker_has_all_rows_of_a_wide_table_where_the_nodes_share_a_host(
    request_of: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    names = [f"f{i}" for i in range(100)]
    pq.write_table(pa.table({name: [0.0] * 400 for name in [*names, "y"]}), tmp_path / "wide.parquet")
    wide = {"framework": "lightgbm", "dataset": {"paths": [str(tmp_path / "wide.parquet")]}, "input_cols": names}
    shared = NodeMemory(800 * MIB, is_shared=True, source="a test")
    here, pods = (plan_training(request_of(**wide), node, cpus=1, most_nodes=2) for node in (shared, own(800)))
    assert [(size.workers, size.rows, size.room_bytes // MIB) for size in here.sizes] == [(1, 400, 800)] * 2
    assert [(size.workers, size.rows) for size in pods.sizes] == [(1, 400), (2, 200)]


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


@pytest.mark.parametrize(("registers", "mib"), [(False, 1024 - 170), (True, 1024 - 170 - 150)])
def test_the_driver_on_the_same_machine_has_its_share(
    registers: bool, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1024 * MIB)
    found = node_memory(PoolSpec.parse("local://a"), registers=registers)
    assert found is not None and found.is_shared and found.usable_bytes == mib * MIB
