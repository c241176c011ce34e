"""One case of the crash matrix per operation on real Ray nodes: SIGKILL in the middle, then sweeps.

`make test` tries what leaves Ray's processes behind: a start and a loss. The whole matrix is tried on tiny nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.pool.api import ComputePool
from shoal.pool.reconciling import sweep
from shoal.state import Store
from shoal.state.home import file_lock, lock_file
from shoal.state.schema import NodeState
from tests.support.homes import new_home
from tests.support.killed_pool_operations import HOLDER, run
from tests.support.node_leftovers import Watch
from tests.support.pool_processes import kill_supervisor, node_rows, nothing_left
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray

URI = "local://real"


@pytest.fixture(scope="module")
def alone() -> Iterator[ComputePool]:
    """A real pool in a home of its own, without the detached reconciler: it would be done before anybody is killed."""
    with new_home(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
        # Held, so that no supervisor revives it.
        with file_lock(lock_file("reconciler")):
            pool = ComputePool(URI, holder=HOLDER).up()
            yield pool
            pool.down()
            nothing_left()


SOAK = pytest.mark.long


@pytest.mark.parametrize(
    ("operation", "before", "point", "after"),
    [
        pytest.param("growing", 1, "after start", 3, id="growing"),
        pytest.param("shrinking", 3, "after end", 1, id="shrinking", marks=SOAK),
        pytest.param("rolling back", 1, "before confirm", 1, id="rolling back", marks=SOAK),
        pytest.param("sweeping", 2, "after end", 2, id="sweeping"),
    ],
)
def test_killed(alone, operation, before, point, after):
    alone.scale(before)
    watch = Watch()
    watch.look()
    if operation == "sweeping":
        kill_supervisor(next(node for node in node_rows() if not node.is_head))
    assert run(URI, operation, point) is None
    watch.look()

    def settled() -> bool:
        sweep(Store())
        watch.look()
        return [node.state for node in node_rows()] == [NodeState.READY] * after and not watch.left_over()

    wait_until(settled, f"{after} nodes and nothing else", seconds=120)
    assert len(alone.get_nodes()) == alone.describe().target == after
    assert sweep(Store()) == []
