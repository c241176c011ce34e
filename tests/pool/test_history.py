"""What a pool's changes leave in the record of actions."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from shoal import history
from shoal.errors import InvalidArgumentError, ScaleError
from shoal.history import acting_as
from shoal.jobs import sweep
from shoal.os_processes import hostname
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import reconcile
from shoal.state import Store
from shoal.state.schema import Node
from tests.support.tiny_node import FAIL_FILE
from tests.support.waiting import wait_until


def recorded() -> list[tuple[str, str, str | None, str]]:
    """Every line, the oldest first."""
    return [(one.kind, one.actor, one.detail, one.outcome) for one in reversed(history.read())]


def test_each_change_of_a_pool_has_its_actor_and_its_outcome(tiny):
    pool = ComputePool("local://tiny?max_nodes=4", holder="airflow:retrain/monday")
    run = pool.holder
    pool.up()
    with acting_as("anna"):
        pool.scale(2)
        pool.alter(max_nodes=3)
        [node] = [one.name for one in pool.describe().active if not one.is_head]
        pool.retire_node(node, within_s=600)
    store = Store()

    def is_replaced() -> bool:
        reconcile(store, "tiny")
        with store.reading() as session:
            names = list(session.scalars(select(Node.name)))
        return len(names) == 2 and node not in names

    wait_until(is_replaced, "the replacement of the retired node")
    with pytest.raises(InvalidArgumentError):
        pool.scale(9)
    with pool.lease(3, exclusive=True):
        pass
    pool.release()
    (tiny / FAIL_FILE).touch()
    with pytest.raises(ScaleError):
        pool.scale(3, options={"rollback_after_seconds": 60})
    (tiny / FAIL_FILE).unlink()
    with acting_as("ben"):
        pool.down()
        pool.down()
        pool.delete()

    lines = recorded()

    failed = lines.pop(-3)
    assert failed[:3] == ("scaled", run, "2 -> 3 nodes")
    assert failed[3].startswith("rolled back: ")
    assert lines == [
        ("created", run, "local://tiny", "done"),
        ("started", run, "1 node", "requested"),
        ("started", run, "1 node", "succeeded"),
        ("scaled", "anna", "1 -> 2 nodes", "requested"),
        ("scaled", "anna", "1 -> 2 nodes", "succeeded"),
        ("altered", "anna", "1 to 4 nodes -> 1 to 3 nodes", "done"),
        ("altered", "anna", f"node {node} ends within 600 s", "done"),
        ("leased", run, "3 nodes, exclusive", "requested"),
        ("leased", run, "3 nodes, exclusive", "succeeded"),
        ("released", run, None, "done"),
        ("scaled", run, "2 -> 3 nodes", "requested"),
        ("stopped", "ben", None, "done"),
        ("deleted", "ben", None, "done"),
    ]
    assert {one.pool for one in history.read()} == {"tiny"}
    assert [one.subject for one in history.read(kind="released")] == [run]


def test_a_sweep_that_a_user_asked_for_is_recorded_even_if_it_found_nothing(fresh_home):
    sweep()
    assert history.read() == []

    with acting_as("anna"):
        sweep()

    [line] = history.read()
    assert (line.kind, line.actor, line.subject, line.outcome) == ("swept", "anna", hostname(), "nothing to sweep")
