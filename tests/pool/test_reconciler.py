"""The detached reconciler: one a home, and back when it was killed, though nobody asks for anything."""

from __future__ import annotations

import os
import shutil
import threading

import psutil
import pytest

from shoal import ComputePool
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Order
from shoal.os_processes import ProcessId
from shoal.pool import reconciling
from shoal.pool.reconciling import Reading, reconcile
from shoal.pool.supervisor import Supervisor, load_node
from shoal.state import Store, home
from shoal.state.home import open_locked
from shoal.state.schema import Lease, Node
from tests.support.job_store import POOL, add_node, add_pool
from tests.support.statements import statements
from tests.support.waiting import wait_until


def watch_no_jobs(_store: Store, _pools: list[str], _sign: object) -> None:
    """In place of the check for lost jobs."""


def reconcilers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if "shoal.reconciler" in (process.info["cmdline"] or ()) and process.environ()["SHOAL_HOME"] == str(home()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.ray
def test_a_killed_one_is_replaced_by_any_nodes_supervisor(real_pool):
    # One that comes second goes away again, and what starts one has its name as an argument.
    (one,) = wait_until(lambda: found if len(found := reconcilers()) == 1 else None, "the reconciler alone")
    one.kill()
    one.wait()
    assert wait_until(reconcilers, "another one")[0].pid != one.pid


def test_rows_are_read_again_only_after_a_change(either_tiny, monkeypatch):
    pool = ComputePool("local://quiet")
    pool.up()
    pool.wait_for_nodes(1, timeout=60)
    store, lock = Store(), reconciling.lock_path()
    read = []
    reading = Store.reading
    monkeypatch.setattr(Store, "reading", lambda store, **options: read.append(None) or reading(store, **options))
    kept = reconciling.KeptReadings(store)

    def has_read() -> int:
        read.clear()
        assert kept.active_pools(lock) == ["quiet"]
        kept.of("quiet")
        return len(read)

    with open_locked(lock, wait=False):
        seen = wait_until(lambda: has_read() == 0 and reconciling.changes_seen(lock), "a store that nobody changes")
        assert (has_read(), reconciling.changes_seen(lock)) == (0, seen)
        lease = pool.lease(size=1, options={"max_lifetime": 3600})
        assert has_read() == 2
        wait_until(lambda: has_read() == 1, "a store that nobody changes")
        assert reconciling.changes_seen(lock) != seen
        lease.release()
    assert reconciling.changes_seen(lock) != reconciling.changes_seen(lock), "no reconciler runs"
    pool.down()


def test_a_round_over_many_pools_needs_no_query_for_each(fresh_home):
    store, found = Store(), []
    for number in range(24):
        add_pool(store, f"pool-{number}")
        if number in (11, 23):
            kept = reconciling.KeptReadings(store)
            with statements() as seen:
                for name in kept.active_pools(reconciling.lock_path()):
                    assert kept.of(name).snapshot.pool.name == name
            found.append(len(seen))
    assert found[0] == found[1]


def test_what_all_pools_are_read_as_is_what_each_is_read_as(fresh_home):
    store = Store()
    for name in ("a", "b", POOL):
        add_pool(store, name)
    add_node(store, cpus=1)
    for name in ("a", POOL):
        holder = "job:j" if name == "a" else "airflow:dag/run"
        with store.transaction() as session:
            lease = {"ttl": 9.0, "expires_at": 9.0, "max_lifetime": 0.1, "created_at": 1.0, "epoch": 1, "size": 1}
            session.add(Lease(id=name, pool=name, holder=holder, **lease))
    attempts.ask(store, Order("j", "a", "airflow:dag/run", {"fingerprint": "f"}, {}, None), 1.0)
    read = Reading.of_all(store, [POOL, "a"])

    def plain(reading: Reading) -> tuple[object, ...]:
        shot = reading.snapshot
        rows = [vars(row).copy() for row in (shot.pool, *shot.leases, *shot.operations, *shot.nodes)]
        for row in rows:
            del row["_sa_instance_state"]
        return rows, shot.demand, shot.works, shot.lasting, reading.spent, reading.ages

    assert {name: plain(each) for name, each in read.items()} == {
        name: plain(Reading.of(store, name)) for name in ("a", POOL)
    }
    assert [(each.snapshot.works, each.snapshot.lasting) for each in read.values()] == [(True, {"a"}), (False, set())]


def test_a_supervisor_reads_its_row_after_it_has_written_it(fresh_home):
    """With the old row, a node that became ready just before its deadline would be ended."""
    store = Store()
    add_pool(store)
    add_node(store, cpus=1)
    supervisor = Supervisor("0123456789", 1, load_node)
    supervisor._store = store
    with store.transaction() as session:
        session.get_one(Node, "0123456789").supervisor = ProcessId.mine().to_json()
    lock = reconciling.lock_path()
    with open_locked(lock, wait=False):
        os.utime(lock, (0, 0))  # the reconciler sees no change
        assert supervisor._checked_row().busy is False
        supervisor._report(busy=True)
        assert supervisor._checked_row().busy is True


def test_a_pool_that_takes_its_time_holds_up_no_other(tiny, monkeypatch):
    """A foreign cluster that falls silent takes up to 45 s a round."""
    slow, quick = (ComputePool(f"local://{name}") for name in ("slow", "quick"))
    slow.up()
    quick.up()
    answers, begun = threading.Event(), []

    def round_of(store, name, *, reading):
        begun.append(name)
        if name == "slow":
            assert answers.wait(60)
        return reconcile(store, name, reading=reading)

    monkeypatch.setattr(reconciling, "reconcile", round_of)
    detached = threading.Thread(target=reconciling.run, args=(watch_no_jobs,), daemon=True)
    detached.start()
    try:
        wait_until(lambda: begun.count("quick") >= 3, "three rounds of the other pool")
        assert begun.count("slow") == 1
    finally:
        answers.set()
    slow.down()
    quick.down()
    detached.join(30)
    assert not detached.is_alive()


def test_it_ends_when_the_home_is_removed_though_the_store_is_elsewhere(tmp_path, fresh_home, monkeypatch):
    """It would run for ever: a PostgreSQL server that is gone too is an outage of the store, which may pass."""
    monkeypatch.setenv("SHOAL_STATE_URL", f"sqlite:///{tmp_path / 'state.db'}")
    Store()
    polls = []

    def outage(_store):
        polls.append(None)
        shutil.rmtree(fresh_home)
        home()  # what else runs makes the folder anew

    monkeypatch.setattr(reconciling, "_all_pools", outage)
    reconciling.run(watch_no_jobs)
    assert len(polls) == 1


def test_it_ends_when_the_store_has_been_silent_for_as_long_as_nodes_wait(fresh_home, monkeypatch, caplog):
    Store()
    polls = []
    monkeypatch.setattr(reconciling, "_all_pools", polls.append)
    monkeypatch.setattr(reconciling, "STORE_PATIENCE", 0.0)
    monkeypatch.setattr(reconciling, "RECONCILE_PERIOD", 0.01)
    reconciling.run(watch_no_jobs)
    assert "the store could not be reached for 0 s" in caplog.text


def test_a_short_outage_of_the_store_does_not_end_it(fresh_home, monkeypatch):
    Store()
    monkeypatch.setattr(reconciling, "RECONCILE_PERIOD", 0.01)
    answers = iter([None, [], []])
    monkeypatch.setattr(reconciling, "_all_pools", lambda _store: next(answers))
    reconciling.run(watch_no_jobs)
    assert next(answers, "all asked for") == "all asked for"
