"""SIGKILL of the acting process at every point of every step, then sweeps: the pool is at its demand, and no more."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shoal.pool
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.backends.local.backend import node_folder, token_path
from shoal.pool.backends.local.processes import NODE_TAG, spawn_detached
from shoal.pool.journal.rows import JournalStep
from shoal.pool.reconciling import sweep
from shoal.state import Store, home
from shoal.state.schema import NodeState
from tests.support.killed_pool_operations import HOLDER, fork, points
from tests.support.node_leftovers import Watch
from tests.support.pool_processes import kill_supervisor, node_rows
from tests.support.tiny_node import DIE_FILE, FAIL_FILE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.crash

URI = "local://tiny"
STRAY = "0123456789"
REQUEST, WITHDRAW, INTEND, START, CLAIM, REPORT, END, CONFIRM, TIDY, CLEAR = JournalStep


@dataclass(frozen=True)
class Case:
    """An operation, and what the pool is like before it.

    Attributes:
        prepare: Makes the pool.
        steps: All that the operation goes through.
        sizes: The pool's demand before and after the operation is decided on.
        tried: Steps that are tried; the others are those of another operation.
        decides: The step that decides on it.
        waits: Whether a lease waits, and its request is open, until the operation is decided on.
    """

    prepare: Callable[[], object]
    steps: tuple[JournalStep, ...]
    sizes: tuple[int, int]
    tried: tuple[JournalStep, ...] | None = None
    decides: JournalStep = REQUEST
    waits: bool = False

    def points(self) -> list[str]:
        return points(*(self.tried or self.steps))

    def is_decided(self, point: str) -> bool:
        return point not in points(self.decides)[:2]


def up() -> ComputePool:
    return ComputePool(URI, holder=HOLDER).up()


def without_capacity() -> None:
    up()
    (home() / FAIL_FILE).write_text("out of capacity")


def leased() -> None:
    """Another holder has 3 of the 4 nodes."""
    ComputePool(URI, holder="test:other").lease(3, exclusive=True, bring_up=True)


def with_one_waiting() -> None:
    """The holder has 3 of the 4 nodes, and another one's lease of 2 waits."""
    ComputePool(URI, holder=HOLDER).lease(3, exclusive=True, bring_up=True)
    ComputePool(URI, holder="test:other").lease(2, exclusive=True, is_async=True)


def with_leftovers() -> None:
    """A node whose supervisor is dead, and one that has no row."""
    up().scale(2)
    kill_supervisor(next(node for node in node_rows() if not node.is_head))
    spawn_detached(
        ["/bin/sleep", "1000"],
        env={NODE_TAG: STRAY, "SHOAL_HOME": str(home())},
        log=node_folder(STRAY) / "log",
    )


CASES = {
    "growing": Case(up, (REQUEST, INTEND, START), (1, 3)),
    "shrinking": Case(lambda: up().scale(3), (REQUEST, INTEND, END, CONFIRM), (3, 1)),
    "rolling back": Case(
        without_capacity, (REQUEST, INTEND, START, END, CONFIRM, WITHDRAW), (1, 1), tried=(END, CONFIRM)
    ),
    "giving up": Case(
        up, (REQUEST, INTEND, START, WITHDRAW, END, CONFIRM), (3, 1), tried=(WITHDRAW, END), decides=WITHDRAW
    ),
    "leasing": Case(lambda: None, (REQUEST, INTEND, START), (0, 2)),
    "releasing": Case(
        lambda: ComputePool(URI, holder=HOLDER).lease(2, bring_up=True),
        (REQUEST, INTEND, END, CONFIRM, TIDY),
        (2, 0),
    ),
    "queueing": Case(leased, (REQUEST, WITHDRAW), (3, 3)),
    "handing over": Case(
        with_one_waiting, (REQUEST, INTEND, END, CONFIRM), (3, 2), tried=(REQUEST, INTEND), waits=True
    ),
    "taking down": Case(up, (REQUEST, INTEND, END, CONFIRM, TIDY), (1, 0)),
    "sweeping": Case(with_leftovers, (INTEND, START, END, CONFIRM, CLEAR), (2, 2)),
}
"""Every operation that changes a pool. Bringing up takes the steps of leasing."""

SUPERVISING = (CLAIM, REPORT)


def settle(size: int, watch: Watch, *, waits: bool = False) -> None:
    """Sweep until the pool has `size` nodes and nothing is there besides, but the request of a lease that waits."""

    def unsettled() -> list[str]:
        sweep(Store())
        watch.look()
        states = [node.state for node in node_rows()]
        left = [each for each in watch.left_over() if not (waits and each.startswith("operation lease"))]
        return left if states == [NodeState.READY] * size else [f"nodes are {states}"]

    wait_until(lambda: not unsettled(), f"{size} nodes and nothing else", seconds=60)
    assert sweep(Store()) == []
    if list_pools():  # one that was never written may have left its token, which the next `up` overwrites
        assert token_path("tiny").exists() == (size > 0)


@pytest.fixture
def watch(tiny: Path) -> Iterator[Watch]:
    return Watch()


def matrix() -> list[Any]:
    """All points of all operations, marked `long` where another leaves the same rows.

    Before a step the store is what it was after the one before. Written and not committed, a transaction leaves what
    was there before it, whoever wrote: one operation tries that for each step.
    """
    seen: set[str] = set()
    params = []
    for operation, case in CASES.items():
        for point in case.points():
            tells = point.startswith("after") or (point.startswith("written") and point not in seen)
            seen.add(point)
            params.append(pytest.param(operation, point, marks=[] if tells else [pytest.mark.long]))
    return params


@pytest.mark.parametrize(("operation", "point"), matrix())
def test_killed(tiny, watch, operation, point):
    case = CASES[operation]
    case.prepare()
    watch.look()
    assert fork(URI, operation, die_at=point) is None
    watch.look()
    is_decided = case.is_decided(point)
    settle(case.sizes[is_decided], watch, waits=case.waits and not is_decided)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=[pytest.mark.long] if point.startswith("before") else [])
        for point in points(*SUPERVISING)
    ],
)
def test_a_supervisor_killed(tiny, watch, point):
    pool = up()
    (tiny / DIE_FILE).write_text(point)
    assert pool.scale(2)
    assert not (tiny / DIE_FILE).exists()
    settle(2, watch)


@pytest.mark.parametrize("operation", CASES)
def test_every_step_of_an_operation_is_listed(tiny, operation):
    """A step that an operation goes through, and the matrix does not know of, fails here."""
    case = CASES[operation]
    case.prepare()
    assert sorted(fork(URI, operation, die_at="nowhere")) == sorted(points(*case.steps))


def test_every_step_is_tried():
    tried = {point for case in CASES.values() for point in case.points()} | set(points(*SUPERVISING))
    assert tried == set(points(*JournalStep))


def test_every_transaction_is_a_step():
    """What changes a pool goes through `journal.rows`; removing old logs and operations there changes none."""
    texts = {path.name: path.read_text() for path in Path(shoal.pool.__file__).parent.rglob("*.py")}
    found = {name: len(calls) for name, text in texts.items() if (calls := re.findall(r"tore\.transaction\(", text))}
    assert found == {"rows.py": 1}
