"""A node will shut down soon (`ray drain-node`): the training moves at its next checkpoint, or a function saves one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from shoal import RunConfig
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, get_context
from shoal.distributors.xgboost import XGBScalingConfig
from shoal.jobs.driver.leaving_nodes import LeavingWatch
from shoal.pool.journal import rows as pool_rows
from shoal.pool.scaling_plan import plan_nodes
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Lease, Node, NodeState
from shoal.training import cluster
from shoal.training.boosting.engine import train
from shoal.training.gang.gang import end_gangs
from tests.support.boosting_trainings import SAMPLED, Losses, resumable
from tests.support.job_store import POOL, change_pool, store
from tests.support.two_node_cluster import TwoNodes
from tests.support.waiting import wait_until

__all__ = ["store"]

pytestmark = pytest.mark.ray


@pytest.fixture
def renewed(driver: TwoNodes) -> Iterator[TwoNodes]:
    """The second node is drained in the test, and is replaced after it."""
    yield driver
    driver.replace_second()


def busy_on(node_id: str) -> Any:
    """Return an actor that uses a CPU of a node as long as it is referenced: Ray ends an idle node that is drained at
    once."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote
    class Busy:
        def ready(self) -> bool:
            return True

    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = Busy.options(num_cpus=1, scheduling_strategy=place).remote()
    ray.get(actor.ready.remote())
    return actor


def test_a_training_moves_at_the_next_checkpoint_if_there_is_room_and_is_the_same_model(
    renewed: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = resumable(
        rows, params=SAMPLED["xgboost"], scaling_config=XGBScalingConfig(num_workers=2, num_cpu_per_worker=1)
    )
    whole = train(two)
    with ExitStack() as stack:

        def drain_beside_a_third() -> None:
            stack.enter_context(renewed.third())
            renewed.drain_second()

        with monkeypatch.context() as patch:
            Losses(patch, 1, deed=renewed.drain_second)
            stayed = train(two)
        end_gangs()
        renewed.replace_second()
        Losses(monkeypatch, 1, deed=drain_beside_a_third)
        moved = train(two)
        end_gangs()

    assert [{worker.node for worker in each.workers} for each in (stayed, moved)] == [{"a-head", "b"}, {"a-head", "c"}]
    assert stayed.model == moved.model == whole.model
    assert stayed.restarts == moved.restarts == 0
    assert "node b will shut down soon: continuing from round 8 of 10 on other nodes" in capsys.readouterr().out


def test_a_function_is_told_once_until_it_has_saved_a_checkpoint(renewed: TwoNodes, tmp_path: Path) -> None:
    def saves_when_told(begun: str) -> bool:
        context = get_context()
        if context.get_rank() == 0:  # the other rank may begin after the announcement
            assert not context.should_checkpoint()
            Path(begun).touch()
            wait_until(context.should_checkpoint, "the node's announced end")
            context.save_checkpoint({"step": 1})
        return context.should_checkpoint()

    def announce() -> None:
        # Two workers import PyTorch first, which takes longer than half a minute on a busy machine.
        wait_until((tmp_path / "begun").exists, "the function", seconds=120)
        renewed.drain_second()

    thread = Thread(target=announce)
    thread.start()
    run = PyTorchDistributor(
        saves_when_told, PyTorchScalingConfig(num_nodes=2), RunConfig(artifact_location=str(tmp_path))
    ).run(str(tmp_path / "begun"))
    thread.join()

    assert run.get_results()[0] is False


def test_outside_a_gang_no_node_leaves() -> None:
    assert get_context().should_checkpoint() is False


def test_a_driver_notes_the_end_so_that_the_reconciler_replaces_the_node_of_a_cluster_of_others(
    renewed: TwoNodes, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    head, second = cluster.node_names()
    with store.transaction() as session:
        for name, node_id in (("head", head), ("second", second)):
            session.add(
                Node(
                    id=name, pool=POOL, name=name, is_head=name == "head", state=NodeState.READY, epoch=1, cpus=1,
                    gpus=0, endpoint={"ray_node_id": node_id}, busy=True, start_deadline=0.0, created_at=0.0,
                    head_id=None if name == "head" else "head",
                )
            )  # fmt: skip
        session.add(
            Lease(id="l", pool=POOL, holder="job:x", size=2, epoch=1, ttl=900.0, expires_at=9e9, created_at=0.0)
        )
    watch = LeavingWatch(store, POOL)

    def ends() -> dict[str, bool]:
        with store.reading() as session:
            return {node.name: node.leaving_at is not None for node in session.query(Node)}

    watch.look()
    work = busy_on(second)
    renewed.drain_second()
    watch.look()
    assert ends() == {"head": False, "second": False}  # the supervisors of a local pool know it before
    change_pool(store, PoolSpec(name=POOL, backend="ray", address="http://head:1"))
    LeavingWatch(store, POOL).look()
    watch.look()
    del work

    assert ends() == {"head": False, "second": True}
    assert capsys.readouterr().out.splitlines() == ["node b will shut down soon"] * 2
    with store.reading() as session:
        plan = plan_nodes(pool_rows.load(session, POOL, lock=False), time.time())
    assert (plan.start_workers, plan.end, plan.drain) == (1, (), ())
