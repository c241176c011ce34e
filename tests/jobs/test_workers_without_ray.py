"""Workers on several nodes without Ray: they belong to their nodes and end with them, and no process of Ray runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal import ComputePool
from shoal.errors import JobFailedError
from tests.jobs.test_forked_workers import (
    RESTARTS,
    driver_of,
    forever,
    kill_supervisor,
    kill_template,
    pids_of,
    row_of,
    rows,
    training,
    workers_by_node,
)
from tests.support.pool_processes import living, node_processes, node_rows, nothing_left
from tests.support.two_node_cluster import assert_ended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

__all__ = ["rows"]


@pytest.fixture
def small_pool(fresh_home: Path) -> Iterator[ComputePool]:
    """Two nodes of one CPU each, without Ray; there may be one more."""
    pool = ComputePool("local://small?max_nodes=3&min_nodes=2&ray=false").up()
    yield pool
    pool.down()
    nothing_left()


@pytest.mark.timeout(300)
def test_a_training_survives_a_killed_node_and_template_and_ends_with_its_driver(
    small_pool: ComputePool, rows: Path
) -> None:
    names = {node["name"] for node in small_pool.get_nodes()}
    for name in names:
        if not row_of(name).is_head:
            assert len(node_processes(row_of(name))) == 1, "an idle node is more than its supervisor"
    kills: list[tuple[Callable[[str, psutil.Process], None], str]] = [
        (kill_supervisor, "was lost: the supervisor of its node ended, so the node is lost"),
        (kill_template, "was lost: the process that started it ended"),
    ]
    handle = forever(small_pool, rows, "xgboost", 2)
    found = training(handle)
    for restarts, (kill, cause) in enumerate(kills, 1):
        assert {name: len(workers) for name, workers in found.items()} == dict.fromkeys(
            (node["name"] for node in small_pool.get_nodes()), 1
        )
        name, [worker] = next((name, each) for name, each in found.items() if not row_of(name).is_head)
        assert worker.pid in {process.pid for process in node_processes(row_of(name))}
        kill(name, worker)
        lost = pids_of(found)
        found = training(handle, restarts)
        [line] = [line for line in handle.logs() if f"(restart {restarts} of {RESTARTS})" in line]
        assert cause in line
        assert_ended(lost)
    wait_until(lambda: all(node.busy for node in small_pool.describe().active), "the nodes to be busy")
    assert not [each.command for each in living() if each.is_of_home() and each.command.startswith(b"ray")]
    driver_of(handle).signal(signal.SIGKILL)
    assert_ended(pids_of(found))
    with pytest.raises(JobFailedError, match="was killed"):
        handle.wait(on_log=None)
    wait_until(lambda: not any(node.busy for node in small_pool.describe().active), "the CPUs to be free")


def test_a_training_moves_from_a_node_that_will_shut_down_and_ends_with_the_head(
    small_pool: ComputePool, rows: Path
) -> None:
    handle = forever(small_pool, rows, "lightgbm", 2)
    assert sorted(training(handle)) == ["small-0", "small-1"]
    small_pool.retire_node("small-1")
    wait_until(lambda: "small-1 will shut down soon: continuing" in "\n".join(handle.logs()), "the move", 60)
    wait_until(lambda: sorted(workers_by_node()) == ["small-0", "small-2"], "the workers on the other node", 60)
    found = workers_by_node()
    head = row_of("small-0")
    kill_supervisor(head.name, found[head.name][0])
    assert_ended(pids_of(found))
    with pytest.raises(JobFailedError):
        handle.wait(on_log=None)
    wait_until(lambda: [node.is_head for node in small_pool.describe().active] == [True, False], "a new head", 60)
    assert head.id not in {row.id for row in node_rows()}
