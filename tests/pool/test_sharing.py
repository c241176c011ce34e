"""Two runs on one real pool: what one gives back or never gets takes no node that the other works on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal import ComputePool
from shoal.errors import ScaleError
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray

_WORK = """
import json, ray, sys
ray.init()

@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Worker:
    def __init__(self): self.answered = 0
    def answer(self):
        self.answered += 1
        return ray.get_runtime_context().get_node_id(), self.answered

workers = [Worker.remote() for _ in range(3)]
while True:
    print(json.dumps(ray.get([worker.answer.remote() for worker in workers], timeout=60)), flush=True)
    if not sys.stdin.readline(): break
"""


@pytest.fixture
def work(real_pool) -> Iterator[subprocess.Popen]:
    """A driver with a worker on each of three nodes, which are leased for it; each line that it is sent, all answer."""
    real_pool.scale(1)
    mine = ComputePool("tests", holder="test:works")
    with mine.lease(3):
        endpoint = "ComputePool('tests').endpoint().driver_environment()"
        code = (
            f"import os, sys; from shoal import ComputePool; env = {{**os.environ, **{endpoint}}}\n"
            f"os.execve(sys.executable, [sys.executable, '-c', {_WORK!r}], env)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        try:
            yield process
        finally:
            process.communicate(timeout=60)
    wait_until(lambda: len(real_pool.get_nodes()) == 1, "the pool as it was", 60)


def answers(process: subprocess.Popen) -> tuple[set[str], set[int]]:
    """The nodes that the workers are on, and how often each has answered: one that was started anew begins at 1."""
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    return {node for node, _ in said}, {times for _, times in said}


def again(process: subprocess.Popen) -> tuple[set[str], set[int]]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answers(process)


def test_one_rolls_back_and_one_releases_while_the_other_works(work, real_pool):
    nodes, times = answers(work)
    assert (len(nodes), times) == (3, {1})
    before = {row.id for row in node_rows()}
    other = ComputePool("tests", holder="test:other")

    with pytest.raises(ScaleError, match="the lease was removed"):
        other.lease(4, options={"rollback_after_seconds": 0.5})  # sooner than any node is up

    assert again(work) == (nodes, {2})
    with other.lease(4):
        assert len(real_pool.get_nodes()) == 4
    wait_until(lambda: {row.id for row in node_rows()} == before, "the same three nodes", 60)
    assert again(work) == (nodes, {3})
    assert len(real_pool.get_nodes()) == 3
