"""SIGKILL of the acting process at every step, then one sweep: the pool is at its demand, and nothing else is there."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from sqlalchemy import select

from shoal.pool.api import ComputePool
from shoal.pool.reconcile import sweep
from shoal.state import Store
from shoal.state.schema import NodeState, Operation, OperationState
from tests.pool.conftest import ROOT
from tests.pool.looking import folders, rows, tagged
from tests.pool.tiny import FAIL_FILE
from tests.waiting import wait_until

pytestmark = pytest.mark.crash

STEPS = [
    "before request_scale",
    "request_scale, not committed",
    "request_scale, committed",
    "before advance",
    "advance, not committed",
    "advance, committed",
]
STARTS = ["before a start", "after a start"]
ENDS = ["before the ends", "after the ends", "before forget", "forget, not committed", "forget, committed"]


def act(size: int, step: str, deadline: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.pool.act", str(size), str(deadline), step],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def settle(size: int) -> None:
    """Sweep until the pool has `size` nodes; then look that it has nothing else."""

    def settled() -> bool:
        sweep(Store())
        nodes = rows()
        return len(nodes) == size and all(node.state is NodeState.READY for node in nodes)

    wait_until(settled, f"{size} nodes", seconds=60)
    assert folders() == sorted(node.id for node in rows())
    # A supervisor and two of its three children carry the tag; the third one dropped it.
    assert len(tagged()) == 3 * size
    assert sweep(Store()) == []


def open_operations() -> int:
    with Store().transaction() as session:
        return len(session.scalars(select(Operation).where(Operation.state == OperationState.OPEN)).all())


@pytest.mark.parametrize("step", STEPS + STARTS)
def test_growing(tiny, step):
    pool = ComputePool("local://tiny").up()
    died = act(3, step)
    assert died.returncode == -signal.SIGKILL, died.stdout + died.stderr
    accepted = step not in STEPS[:2]
    settle(3 if accepted else 1)
    assert pool.describe().target == (3 if accepted else 1)
    assert open_operations() == 0


@pytest.mark.parametrize("step", STEPS + ENDS)
def test_shrinking(tiny, step):
    pool = ComputePool("local://tiny").up()
    pool.scale(3)
    died = act(1, step)
    assert died.returncode == -signal.SIGKILL, died.stdout + died.stderr
    settle(3 if step in STEPS[:2] else 1)


@pytest.mark.parametrize("step", ENDS)
def test_rolling_back(tiny, step):
    """Nodes that refuse to start are cleared and the old demand restored, wherever the process that does it dies."""
    ComputePool("local://tiny").up()
    (tiny / FAIL_FILE).write_text("out of capacity")
    died = act(3, step)
    assert died.returncode == -signal.SIGKILL, died.stdout + died.stderr

    def rolled_back() -> bool:
        sweep(Store())
        return open_operations() == 0 and len(rows()) == 1

    wait_until(rolled_back, "the rollback", seconds=60)
    (tiny / FAIL_FILE).unlink()
    settle(1)


def test_every_step_is_listed(tiny):
    """The steps above are all that there are: a new one has to be added to the matrix."""
    ComputePool("local://tiny").up()
    grown = act(3, "none").stdout.splitlines()
    shrunk = act(1, "none").stdout.splitlines()
    assert grown[0] == shrunk[0] == "scaled"
    assert sorted(set(grown[1:])) == sorted(STEPS + STARTS)
    assert sorted(set(shrunk[1:])) == sorted(STEPS + ENDS)
