"""Which waiting job of a pool starts next, from rows alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.dataset_spec import DatasetSpec
from shoal.distributors.call_pool import gpus_of
from shoal.distributors.lightgbm import LightGBMEstimator
from shoal.jobs import FunctionJobSpec, JobSpec
from shoal.jobs.scheduling import DRIVER_BYTES, Entry, Room, drivers_in, fewest_nodes, in_order, next_up
from shoal.kinds.prediction.spec import PredictJobSpec
from shoal.pool.backends.local.gpus import ALL
from shoal.pool.spec import PoolSpec
from shoal.training.cluster import Node
from shoal.training.demand import GangClaim, NodeSize, ScalingConfig
from shoal.training.pytorch.request import PyTorchScalingConfig, SpreadScalingConfig, WorkerResourceConfig

ONE_CPU = GangClaim(workers=1, cpus=1)
TWO_NODES = (NodeSize(2, 0), NodeSize(2, 0))


def entry(
    name: str, *, holder: str = "a", priority: int = 0, at: float = 0.0, waits: bool = True, gang: GangClaim = ONE_CPU,
    most_nodes: int | None = None,
):  # fmt: skip
    return Entry((name, 1), holder, priority, at, waits, gang, most_nodes)


def names(entries: list[Entry]) -> str:
    return "".join(each.key[0] for each in entries)


@pytest.mark.parametrize(
    ("entries", "order"),
    [
        ([], ""),
        ([entry("x", at=2), entry("y", at=1)], "yx"),
        ([entry("x", at=1), entry("y", at=2, priority=1), entry("z", at=0, priority=-1)], "yxz"),
        ([entry("1", at=1), entry("2", at=2), entry("3", at=3), entry("x", holder="b", at=9)], "1x23"),
        (
            [entry("r", waits=False), entry("1", at=1), entry("x", holder="b", at=9), entry("y", holder="b", at=9)],
            "x1y",
        ),
        (
            [entry("1", at=1), entry("2", at=2), entry("x", holder="b", at=9, priority=1), entry("y", holder="b")],
            "x1y2",
        ),
        ([entry("y", at=1), entry("x", at=1)], "xy"),
    ],
    ids=["nothing", "age", "priority", "holders in turn", "fewest running first", "priority counts", "a tie"],
)
def test_the_order_is_priority_then_holders_in_turn_then_age(entries, order):
    assert names(in_order(entries)) == order


WAITING = [entry(name, at=at) for at, name in enumerate("123456")]


@pytest.mark.parametrize(
    ("entries", "room", "started"),
    [
        (WAITING, Room(10, TWO_NODES), "1234"),
        (WAITING, Room(3, TWO_NODES), "123"),
        (WAITING, Room(0, TWO_NODES), "1"),
        (WAITING, Room(None, ()), "123456"),
        ([entry("r", waits=False), *WAITING], Room(10, TWO_NODES), "123"),
        ([entry("r", waits=False, gang=GangClaim()), *WAITING], Room(10, TWO_NODES), ""),
        ([entry("r", waits=False, gang=GangClaim(workers=9, cpus=9)), *WAITING], Room(10, TWO_NODES), ""),
        ([entry("b", at=-1, gang=GangClaim(workers=9, cpus=9)), *WAITING], Room(10, TWO_NODES), "b"),
        ([entry("r", waits=False), entry("b", at=-1, gang=GangClaim(4, 1)), *WAITING], Room(10, TWO_NODES), ""),
        ([entry(name, gang=GangClaim(1, 1, 1)) for name in "gh"], Room(10, (NodeSize(4, 1),)), "g"),
        ([entry("z", at=-1, gang=GangClaim(1, 0)), *WAITING], Room(10, (NodeSize(1, 0),)), "z1"),
        ([*WAITING, entry("p", at=9, gang=GangClaim(0, 0))], Room(10, (NodeSize(1, 0),)), "1p"),
        ([entry(name, gang=GangClaim(), most_nodes=1) for name in "xyz"], Room(10, TWO_NODES), "xy"),
        ([entry(name, gang=GangClaim(), most_nodes=1) for name in "xyz"], Room(10, (NodeSize(0, 0), *TWO_NODES)), "xy"),
        ([entry(name, gang=GangClaim(), most_nodes=3) for name in "xy"], Room(10, (NodeSize(0, 0), *TWO_NODES)), "x"),
        ([entry(name, gang=GangClaim(2, 2), most_nodes=1) for name in "xy"], Room(10, TWO_NODES), "x"),
    ],
    ids=[
        "CPUs", "drivers", "always one", "nodes not known", "beside a running one", "a running one takes all",
        "a running one counts with all at most", "more than there is runs alone", "no job overtakes the first", "GPUs",
        "a job without CPUs", "a job without workers overtakes", "all nodes that are kept for each",
        "a head without CPUs", "with all", "as many workers as were asked for",
    ],
)  # fmt: skip
def test_jobs_start_that_there_is_room_for(entries, room, started):
    assert names(next_up(entries, room)) == started


GANGS = st.builds(GangClaim, st.integers(-2, 5).filter(bool), st.integers(-1, 4), st.integers(-1, 2), st.booleans())
ENTRIES = st.lists(
    st.builds(
        Entry,
        st.tuples(st.uuids().map(str), st.just(1)),
        st.sampled_from("abc"),
        st.integers(-1, 1),
        st.integers(0, 3),
        st.booleans(),
        GANGS,
        st.none() | st.integers(1, 3),
    ),
    max_size=12,
)
NODES = st.lists(st.builds(NodeSize, st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=3)
ROOMS = st.builds(Room, st.integers(0, 6), NODES.map(tuple))


def fits(entries: list[Entry], room: Room) -> bool:
    claims = [each.gang.claim(room.nodes, each.most_nodes) for each in entries]
    return (
        room.drivers is not None
        and len(entries) <= room.drivers
        and sum(claim.cpus for claim in claims) <= sum(node.cpus for node in room.nodes)
        and sum(claim.gpus for claim in claims) <= sum(node.gpus for node in room.nodes)
    )


@settings(max_examples=50)
@given(ENTRIES, ROOMS)
def test_it_is_never_idle_when_there_is_room_and_never_above_it(entries, room):
    running = [each for each in entries if not each.waits]
    line, chosen = in_order(entries), next_up(entries, room)

    assert sorted(map(id, line)) == sorted(id(each) for each in entries if each.waits)  # each waiting one, once
    assert chosen == line[: len(chosen)]
    assert not chosen or len(running + chosen) == 1 or fits(running + chosen, room)
    if len(chosen) < len(line):
        assert running + chosen
        assert not fits([*running, *chosen, line[len(chosen)]], room)


@settings(max_examples=50)
@given(ENTRIES)
def test_no_holder_is_two_ahead_of_one_that_waits(entries):
    running = Counter(each.holder for each in entries if not each.waits)
    left = in_order(entries)
    while left:
        first = left.pop(0)
        assert all(each.priority <= first.priority for each in left)
        equals = [each for each in [first, *left] if each.priority == first.priority]
        assert running[first.holder] == min(running[each.holder] for each in equals)
        assert first.queued_at == min(each.queued_at for each in equals if each.holder == first.holder)
        running[first.holder] += 1


def boosting(framework: str = "xgboost", params: dict[str, object] | None = None, **scaling: object) -> JobSpec:
    return JobSpec(
        framework=framework, dataset=DatasetSpec(paths=("/d",)), input_cols=("a",), label_col="y", params=params or {},
        scaling_config=ScalingConfig(**scaling),
    )  # fmt: skip


def function(**fields: object) -> FunctionJobSpec:
    return FunctionJobSpec(train_func="pkg.module:train", **fields)


def reading(cpus: int, datasets: int) -> FunctionJobSpec:
    """Two workers that read datasets with Ray Data."""
    each = WorkerResourceConfig(num_cpus=cpus)
    return function(
        scaling_config=SpreadScalingConfig(num_workers=2, resource_requirements_per_worker=each),
        dataset_map={str(i): DatasetSpec(paths=("/d",), ingester="ray") for i in range(datasets)},
    )


CPUS = (NodeSize(4, 0), NodeSize(4, 0), NodeSize(4, 0))
GPUS = (NodeSize(8, 2), NodeSize(8, 2))


@pytest.mark.parametrize(
    ("spec", "nodes", "claim"),
    [
        (boosting(), CPUS, (12, 0)),
        (boosting(num_workers=1), CPUS, (4, 0)),
        (boosting(num_workers=6), CPUS, (12, 0)),
        (boosting(num_cpu_per_worker=1), CPUS, (3, 0)),
        (boosting(num_workers=2, num_cpu_per_worker=3), CPUS, (6, 0)),
        (boosting(num_workers=20, num_cpu_per_worker=3), CPUS, (12, 0)),
        (boosting(num_cpu_per_worker=1), GPUS, (4, 4)),
        (boosting(num_workers=1, num_cpu_per_worker=1, use_gpu=False), GPUS, (1, 0)),
        (boosting(num_workers=1, num_cpu_per_worker=1, params={"device": "cuda"}), GPUS, (1, 1)),
        (boosting("lightgbm", num_workers=1, num_cpu_per_worker=1), GPUS, (1, 0)),
        (boosting("lightgbm", num_workers=1, num_cpu_per_worker=1, params={"device_type": "gpu"}), GPUS, (1, 1)),
        (PredictJobSpec(model="/model", dataset=DatasetSpec(paths=("/d",)), output_path="/out"), GPUS, (16, 0)),
        (function(), CPUS, (1, 0)),
        (function(scaling_config=PyTorchScalingConfig(num_nodes=-1, num_workers_per_node=2)), CPUS, (6, 0)),
        (function(scaling_config=PyTorchScalingConfig(num_nodes=2, num_workers_per_node=2)), CPUS, (4, 0)),
        (
            function(
                scaling_config=SpreadScalingConfig(
                    num_workers=3, resource_requirements_per_worker=WorkerResourceConfig(num_cpus=2, num_gpus=1)
                )
            ),
            GPUS,
            (6, 3),
        ),
        (
            function(
                scaling_config=PyTorchScalingConfig(
                    num_workers_per_node=-1, resource_requirements_per_worker=WorkerResourceConfig(num_gpus=-1)
                )
            ),
            GPUS,
            (2, 2),
        ),
        (function(scaling_config=PyTorchScalingConfig(num_nodes=-1, num_workers_per_node=-1)), GPUS, (2, 0)),
        (function(room_for=SpreadScalingConfig(num_workers=5)), CPUS, (5, 0)),
        (reading(1, 1), CPUS, (2, 0)),
        (reading(0, 1), CPUS, (1, 0)),
        (reading(0, 3), CPUS, (3, 0)),
        (reading(4, 1), CPUS, (8, 0)),
    ],
)
def test_what_the_workers_of_a_job_take(spec, nodes, claim):
    gang = spec.demand().gang

    assert gang.claim(nodes) == claim
    assert GangClaim(**gang.to_json()) == gang


@pytest.mark.parametrize(
    ("spec", "options", "nodes"),
    [
        (boosting(), {}, 1),
        (boosting(), {"min_nodes": 2}, 2),
        (boosting(num_workers=3, num_cpu_per_worker=2), {}, 3),
        (boosting(num_workers=9, num_cpu_per_worker=2), {}, 4),
        (reading(1, 3), {}, 2),
        (function(room_for=SpreadScalingConfig(num_workers=5)), {}, 3),
        (boosting(num_workers=3, use_gpu=True), {"gpus_per_node": 1}, 3),
        (boosting(num_workers=3, use_gpu=True), {"gpus_per_node": -1}, 1),
    ],
)
def test_the_fewest_nodes_on_which_the_workers_fit(spec, options, nodes):
    pool = PoolSpec(**{"name": "p", "max_nodes": 4, "cpus_per_node": 2, "gpus_per_node": 0, **options})
    assert fewest_nodes(spec.demand(), pool) == nodes


def test_a_quarter_of_the_memory_is_for_drivers():
    assert drivers_in(0) == 1
    assert drivers_in(4 * 5 * DRIVER_BYTES) == 5


@pytest.mark.parametrize("given", [{"device": "cuda"}, {"device_type": "cuda"}])
def test_the_queue_the_embedded_pool_and_the_engine_see_the_gpu_of_a_lightgbm_training(given):
    params = LightGBMEstimator(5, params=given).params
    columns = {"dataset": {"paths": ["/x.parquet"]}, "input_cols": ["a"], "label_col": "y"}
    demand = JobSpec(framework="lightgbm", **columns, params=params).demand()

    assert (demand.gang.gpus, gpus_of(demand), demand.needs_ray) == (1, ALL, True)
    assert demand.size([Node(name="a", cpus=4, gpus=1)], clamp=False).gpus_per_worker == 1
    assert not demand.could_fit(NodeSize(4, 0), 2)
