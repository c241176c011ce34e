"""Many processes that want different things of one pool at once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import pytest

from shoal.errors import InvalidArgumentError, ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import sweep
from shoal.state import Store
from shoal.state.schema import Demand, NodeState, Operation, OperationState
from tests.support.pool_processes import folders, node_rows, tagged
from tests.support.waiting import wait_until

pytestmark = pytest.mark.crash

MAX_NODES = 4


def wants(many: int) -> list[tuple[str, int]]:
    """Sizes of 1 to 6, leases among them: some are above MAX_NODES."""
    return [("lease" if number % 3 == 2 else "scale", 1 + (number * 5) % 6) for number in range(many)]


def contend(what: str, size: int, go: Event, told: Connection) -> None:
    """Wait for the signal, so that all begin together, and tell what became of it.

    Args:
        what: "scale" or "lease".
        size: Nodes.
        go: The signal.
        told: Gets one sentence.
    """
    pool = ComputePool("tiny")
    go.wait()
    try:
        if what == "scale":
            pool.scale(size)
        else:
            with pool.lease(size):
                held = len(pool.get_nodes())
                assert held >= size, f"{held} of {size} nodes while it held the lease"
        told.send("done")
    except (InvalidArgumentError, ScaleError) as error:
        told.send(f"refused: {error}")


@pytest.mark.timeout(600)  # 20 take 112 s here on 2 CPUs, beside the other half of the tests
@pytest.mark.parametrize("many", [12, pytest.param(20, marks=pytest.mark.long)])
def test_many_processes_at_once_each_end_with_success_or_a_clear_refusal(either_tiny, many):
    asked = wants(many)
    pool = ComputePool(f"local://tiny?max_nodes={MAX_NODES}").up()
    context = multiprocessing.get_context("fork")
    go = context.Event()
    pipes = [context.Pipe(duplex=False) for _ in asked]
    processes = [
        context.Process(target=contend, args=(what, size, go, telling))
        for (what, size), (_, telling) in zip(asked, pipes, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        go.set()
        said = [hearing.recv() if hearing.poll(240) else "nothing" for hearing, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for (what, size), out in zip(asked, said, strict=True):
        if size > MAX_NODES:
            assert f"of {size} is above MAX_NODES={MAX_NODES}" in out
        elif what == "lease":
            assert out == "done"  # nobody's demand takes a node of a lease
        else:
            assert out == "done" or "a newer operation set the demand" in out, out

    def settled() -> bool:
        return (
            sweep(Store()) == [] and [node.state for node in node_rows()] == [NodeState.READY] * pool.describe().target
        )

    wait_until(settled, "its demand", seconds=120)
    with Store().reading() as session:
        demand = session.get_one(Demand, "tiny")
        assert session.get_one(Operation, demand.operation_id).state is OperationState.SUCCEEDED
        operations = session.query(Operation).all()
    assert [row.id for row in operations if row.state is OperationState.OPEN] == []
    assert len(operations) == 1 + sum(size <= MAX_NODES for _, size in asked)
    assert pool.describe().leases == ()
    assert len(node_rows()) == demand.size
    assert folders() == sorted(node.id for node in node_rows())
    wait_until(lambda: len(tagged()) == 3 * demand.size, "no process too many")  # one drops its tag as it starts


def hold(holder: str, told: Connection, release: Event) -> None:
    """Lease two nodes exclusively, say so when they are there, and release them at the signal."""
    with ComputePool("tiny", holder=holder).lease(2, exclusive=True):
        told.send("granted")
        release.wait()


def test_exclusive_leases_of_three_processes_add_up_and_wait_their_turn(tiny):
    """The first two have two of the four nodes each; the third gets its turn, and their nodes, when one releases."""
    pool = ComputePool(f"local://tiny?max_nodes={MAX_NODES}").up()
    context = multiprocessing.get_context("fork")
    holders = ["test:one", "test:two", "test:three"]
    pipes = [context.Pipe(duplex=False) for _ in holders]
    releases = [context.Event() for _ in holders]
    processes = [
        context.Process(target=hold, args=(holder, telling, release))
        for holder, (_, telling), release in zip(holders, pipes, releases, strict=True)
    ]
    try:
        for process in processes[:2]:
            process.start()
        assert [hearing.recv() if hearing.poll(60) else "nothing" for hearing, _ in pipes[:2]] == ["granted"] * 2
        before = {node.id for node in node_rows()}
        assert len(before) == 4
        processes[2].start()
        note = "waiting as the next in the queue, 4 of 4 nodes are taken"
        wait_until(lambda: pool.describe().queue_note("test:three") == note, "the third in the queue", 60)
        releases[0].set()
        hearing = pipes[2][0]
        assert (hearing.recv() if hearing.poll(60) else "nothing") == "granted"
        assert {node.id for node in node_rows()} == before
    finally:
        for release in releases:
            release.set()
        for process in processes:
            if process.pid is not None:
                process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
