"""What every backend has to do: the contract of `backends.interface`, on real nodes of each kind.

A new backend adds a case here (`cases.py`): how to have a pool of two nodes, how to lose one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from shoal.errors import InvalidArgumentError
from shoal.pool.api import ComputePool
from shoal.pool.backends.interface import NodeRef, PoolRef, Seen
from shoal.pool.reconciling import reconcile, sweep
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Pool
from tests.pool.backends.cases import Case, Foreign, Kubernetes, Local, backend
from tests.support.fake_kubernetes import ray_cluster
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until

Guarantee = Callable[[Case, ComputePool], None]

GUARANTEES: list[Guarantee] = []
"""The tests of all guarantees, in the order of this file: each takes a pool with one node."""


def guarantee(test: Guarantee) -> Guarantee:
    GUARANTEES.append(test)
    return test


@pytest.fixture
def case(tiny):
    return Local()


@pytest.fixture
def pool(case):
    return ComputePool(case.uri).up()


def ref(case, size):
    with Store().reading() as session:
        return PoolRef.of(session.get_one(Pool, PoolSpec.parse(case.uri).name), size, 0.0)


def refs():
    return [NodeRef.of(node) for node in node_rows()]


def names(pool):
    return [node["name"] for node in pool.get_nodes()]


@guarantee
def test_nodes_are_listed_with_what_they_have_and_the_head_first(case, pool):
    assert pool.scale(2) is True
    assert pool.get_nodes() == [{"name": f"conform-{number}", "cpus": 1, "gpus": 0} for number in range(2)]
    assert [node.is_head for node in pool.describe().active] == [True, False]
    assert pool.endpoint().api.startswith("http://")


@guarantee
def test_starting_again_starts_nothing_more(case, pool):
    pool.scale(2)
    before = {node.id: node.endpoint for node in node_rows()}
    backend(case).start(ref(case, 2), refs())
    reconcile(Store(), pool.name)
    reconcile(Store(), pool.name)
    assert {node.id: node.endpoint for node in node_rows()} == before
    assert len(names(pool)) == 2


@guarantee
def test_two_that_act_at_once_make_one_set_of_nodes(case, pool):
    pool.scale(2, is_async=True)
    both = [threading.Thread(target=reconcile, args=(Store(), pool.name)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    wait_until(lambda: reconcile(Store(), pool.name) is not None and len(names(pool)) == 2, "both nodes")
    assert len({tuple(sorted(node.endpoint.items())) for node in node_rows()}) == 2


@guarantee
def test_looking_changes_nothing(case, pool):
    before = [(node.id, node.state, node.endpoint) for node in node_rows()]
    assert backend(case).look(PoolSpec.parse(case.uri), refs()) == Seen()
    assert backend(case).look(PoolSpec.parse(case.uri), []) == Seen()
    assert [(node.id, node.state, node.endpoint) for node in node_rows()] == before


@guarantee
def test_a_lost_node_is_noticed_and_replaced_while_its_demand_lives(case, pool):
    pool.scale(2)
    victim = next(node for node in node_rows() if not node.is_head)
    case.lose(victim)
    wait_until(lambda: names(pool) == ["conform-0"], "the loss")
    assert set(backend(case).look(PoolSpec.parse(case.uri), refs()).lost) == {victim.id}
    case.mend()

    def replaced():
        reconcile(Store(), pool.name)
        return len(names(pool)) == 2 and victim.name not in names(pool)

    wait_until(replaced, "the replacement")


@guarantee
def test_an_end_is_confirmed_and_may_be_asked_for_again(case, pool):
    pool.scale(2)
    worker = next(node for node in node_rows() if not node.is_head)
    gone = NodeRef.of(worker)
    assert pool.scale(1) is True
    assert [node.is_head for node in node_rows()] == [True]
    assert not case.trace(worker)
    assert backend(case).end(ref(case, 1), [gone]) == {gone.id: None}
    assert names(pool) == ["conform-0"]


@guarantee
def test_a_node_that_never_was_has_ended(case, pool):
    never = NodeRef("0123456789", "never", pool.name, 1, None)
    assert backend(case).end(ref(case, 1), [never]) == {never.id: None}
    assert backend(case).look(PoolSpec.parse(case.uri), refs()) == Seen()


@guarantee
def test_what_is_left_over_is_found_and_cleared(case, pool):
    if not case.leave_behind("ffffffffff"):
        assert backend(case).existing() == []
        return
    assert "ffffffffff" in backend(case).existing()
    assert sweep(Store()) == ["left-over node ffffffffff: ended"]
    assert "ffffffffff" not in backend(case).existing()
    assert sweep(Store()) == []
    assert backend(case).clear("ffffffffff") is None


@guarantee
def test_what_is_refused_changes_nothing(case, pool):
    before = pool.describe().last_operation
    with pytest.raises(InvalidArgumentError, match="MAX_NODES=4"):
        pool.scale(5)
    with pytest.raises(InvalidArgumentError, match="MAX_NODES=4"):
        pool.lease(5)
    assert pool.describe().last_operation == before
    assert pool.describe().target == 1


@guarantee
def test_down_leaves_no_row_and_up_brings_it_again(case, pool):
    pool.scale(2)
    leaving = node_rows()
    pool.down()
    assert node_rows() == []
    assert not any(case.trace(node) for node in leaving)
    pool.down()  # again: nothing happens
    assert names(pool.up()) == ["conform-0"]


@pytest.mark.server
@pytest.mark.parametrize("options", [{}, {"image": "shoal:1"}])
def test_a_ray_cluster_on_kubernetes_keeps_every_guarantee(kube, options):
    case = Kubernetes(kube, options)
    if not options:
        kube.add("rayclusters", ray_cluster("conform"))
    pool = ComputePool(case.uri).up()
    for test in GUARANTEES:
        pool.scale(1)
        test(case, pool)


@pytest.mark.ray
def test_a_ray_cluster_keeps_every_guarantee(alone, static_cluster):
    case = Foreign(static_cluster)
    pool = ComputePool(case.uri).up()
    for test in GUARANTEES:
        pool.scale(1)
        test(case, pool)


@pytest.mark.ray
@pytest.mark.long
def test_ray_nodes_on_this_machine_keep_every_guarantee(alone):
    case = Local()
    pool = ComputePool(case.uri).up()
    for test in GUARANTEES:
        pool.scale(1)
        test(case, pool)
