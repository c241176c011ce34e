"""One case of the crash matrix per operation on a real control plane, and SIGKILLs at random: then sweeps."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.errors import PoolNotFoundError
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import sweep
from shoal.state import Store
from shoal.state.schema import NodeState
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane
from tests.kuberay.pools import Kubernetes, Made, created, existing
from tests.support.killed_pool_operations import HOLDER, run
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until


@pytest.fixture(params=[existing, created])
def kube(
    request: pytest.FixtureRequest,
    plane: ControlPlane,
    cluster: Cluster,
    no_reconciler: None,
    namespace: str,
    tmp_path: Path,
) -> Iterator[Kubernetes]:
    with cluster.client() as api, request.param(plane, api, namespace, tmp_path) as kube:
        yield kube


def up(kube: Kubernetes, size: int = 1) -> ComputePool:
    pool = ComputePool(kube.uri, holder=HOLDER).up()
    pool.scale(size)
    return pool


def without_image(kube: Kubernetes) -> None:
    up(kube)
    kube.plane.remove_image(LIGHT_IMAGE)


def leased_by_another(kube: Kubernetes) -> None:
    ComputePool(kube.uri, holder="test:other").lease(3, exclusive=True, bring_up=True)


def with_one_waiting(kube: Kubernetes) -> None:
    """The holder has 3 of the 4 nodes, and another one's lease of 2 waits."""
    ComputePool(kube.uri, holder=HOLDER).lease(3, exclusive=True, bring_up=True)
    ComputePool(kube.uri, holder="test:other").lease(2, exclusive=True, is_async=True)


def with_a_lost_node(kube: Kubernetes) -> None:
    up(kube, 2)
    kube.lose(next(node for node in node_rows() if not node.is_head))
    kube.mend()


@pytest.mark.parametrize(
    ("operation", "prepare", "point", "after"),
    [
        pytest.param(operation, *case, id=operation)
        for operation, case in {
            "bringing up": (lambda kube: None, "after start", 1),
            "growing": (up, "after start", 3),
            "shrinking": (lambda kube: up(kube, 3), "after end", 1),
            "rolling back": (without_image, "before confirm", 1),
            "giving up": (up, "after withdraw", 1),
            "leasing": (lambda kube: None, "after start", 2),
            "releasing": (lambda kube: ComputePool(kube.uri, holder=HOLDER).lease(2, bring_up=True), "after end", 0),
            "queueing": (leased_by_another, "after request", 3),
            "handing over": (with_one_waiting, "after request", 2),
            "taking down": (up, "after end", 0),
            "sweeping": (with_a_lost_node, "after intend", 2),
        }.items()
    ],
)
def test_killed(
    kube: Kubernetes, operation: str, prepare: Callable[[Kubernetes], object], point: str, after: int
) -> None:
    prepare(kube)
    assert run(kube.uri, operation, point) is None
    kube.plane.add_light_image()

    def settled() -> bool:
        sweep(Store())
        return [node.state for node in node_rows()] == [NodeState.READY] * after and len(kube.pods()) == max(
            after - 1, 0
        )

    wait_until(settled, f"{after} nodes and no other pods", seconds=120, every=0.2)
    stays = 0 if isinstance(kube, Made) else 1  # the head of a RayCluster that others have created
    wait_until(lambda: len(kube.pods(heads=True)) == max(after, stays), "its head or no head", seconds=60)
    assert sweep(Store()) == []


CHANGES = """
import random, sys
from shoal.pool import reconciling
from shoal.pool.api import ComputePool
from shoal.pool.backends import preflight
reconciling.ensure_running, preflight.preflight = lambda: None, lambda *_: []
dice, pool = random.Random(int(sys.argv[2])), ComputePool(sys.argv[1], holder=sys.argv[3])
print("begins", flush=True)
while True:
    pool.up()
    pool.scale(dice.randint(1, 4))
    pool.lease(dice.randint(1, 4))
    pool.scale(dice.randint(1, 4))
    pool.release()
    pool.down()
"""


def there(kube: Kubernetes) -> object:
    """What a pool may have changed."""
    return kube.everything() if isinstance(kube, Made) else (kube.replicas(), kube.pods())


def test_twenty_kills_at_random_leave_nothing(kube: Kubernetes) -> None:
    before, dice = there(kube), random.Random(0)
    for seed in range(20):
        command = [sys.executable, "-c", CHANGES, kube.uri, str(seed), HOLDER]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"begins\n"
            threading.Event().wait(after := dice.uniform(0, 15))
            assert child.poll() is None, f"kill {seed} after {after:.1f} s: it had ended"
            child.kill()
        nodes = [node.state for node in node_rows()]
        with suppress(PoolNotFoundError):  # it had not begun
            ComputePool(kube.name, holder=HOLDER).down()
        wait_until(
            lambda: there(kube) == before, f"the end of all after kill {seed} ({after:.1f} s, {nodes})", seconds=60
        )
        assert sweep(Store()) == []
        print(f"kill {seed} after {after:.1f} s with {nodes}: nothing left", flush=True)
