"""Many processes that want different things of one pool at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.pool.api import ComputePool
from shoal.pool.reconcile import sweep
from shoal.state import Store
from shoal.state.schema import Demand, NodeState, Operation, OperationState
from tests.pool.conftest import ROOT
from tests.pool.looking import folders, rows, tagged
from tests.waiting import wait_until

pytestmark = pytest.mark.crash

MAX_NODES = 4
WANTS = [("lease" if number % 3 == 2 else "scale", 1 + (number * 5) % 6) for number in range(20)]
"""Sizes of 1 to 6, leases among them: some are above MAX_NODES."""


@pytest.mark.timeout(600)  # 112 s here on 2 CPUs, beside the other half of the tests
def test_twenty_processes_at_once_each_end_with_success_or_a_clear_refusal(either_tiny):
    pool = ComputePool(f"local://tiny?max_nodes={MAX_NODES}").up()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.pool.contender", what, str(size)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for what, size in WANTS
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for (what, size), process, (out, err) in zip(WANTS, processes, said, strict=True):
        assert process.returncode == 0, err
        if size > MAX_NODES:
            assert f"of {size} is above MAX_NODES={MAX_NODES}" in out
        elif what == "lease":
            assert out == "done\n"  # nobody's demand takes a node of a lease
        else:
            assert out == "done\n" or "a newer operation set the demand" in out, out

    def settled() -> bool:
        return sweep(Store()) == [] and [node.state for node in rows()] == [NodeState.READY] * pool.describe().target

    wait_until(settled, "its demand", seconds=120)
    with Store().reading() as session:
        demand = session.get_one(Demand, "tiny")
        assert session.get_one(Operation, demand.operation_id).state is OperationState.SUCCEEDED
        operations = session.query(Operation).all()
    assert [row.id for row in operations if row.state is OperationState.OPEN] == []
    assert len(operations) == 1 + sum(size <= MAX_NODES for _, size in WANTS)
    assert pool.describe().leases == ()
    assert len(rows()) == demand.size
    assert folders() == sorted(node.id for node in rows())
    wait_until(lambda: len(tagged()) == 3 * demand.size, "no process too many")  # one drops its tag as it starts
