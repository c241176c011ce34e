"""Pools that are bound to another host on the same store, hosts that were renamed, and rows of shoal 0.1."""

from __future__ import annotations

import json

import pytest

from shoal.errors import InvalidArgumentError, PoolElsewhereError, PoolInUseError, PoolNotFoundError
from shoal.os_processes import host_id, hostname
from shoal.pool import bound_host
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.reconciling import reconcile, sweep
from shoal.state import Store
from shoal.state.schema import Pool, PoolState
from tests.support import another_host
from tests.support.pool_processes import folders, kill_supervisor, node_rows, nothing_left, tagged
from tests.support.tiny_backend import TinyBackend
from tests.support.tiny_pools import ForkingTinyBackend
from tests.support.waiting import wait_until


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4").up()


def bound_to(name: str) -> tuple[str, str | None]:
    with Store().reading() as session:
        pool = session.get_one(Pool, name)
        return pool.host, pool.host_id


def move(name: str, *, to: str, identity: str | None) -> None:
    with Store().transaction() as session:
        pool = session.get_one(Pool, name)
        pool.host, pool.host_id = to, identity


def test_a_pool_stays_with_its_host_when_that_is_renamed(up):
    move("tiny", to="old-name", identity=host_id())

    assert up.scale(2) is True

    assert bound_to("tiny") == (hostname(), host_id())


def test_a_pool_of_another_host_is_not_adopted(up, monkeypatch):
    move("tiny", to="elsewhere", identity="another host")
    try:
        assert sweep(Store()) == []
        # Its nodes may need GPUs that this host does not have: that is not the reason to name.
        monkeypatch.setattr(
            ForkingTinyBackend, "admit", lambda *_: pytest.fail("the other host's nodes were judged here")
        )
        with pytest.raises(PoolElsewhereError, match="local to host elsewhere"):
            up.scale(2)
        assert bound_to("tiny") == ("elsewhere", "another host")
    finally:
        move("tiny", to=hostname(), identity=host_id())


def test_a_container_of_the_same_name_is_another_host(up):
    another_host.required()

    done = another_host.shoal("pool", "down", "tiny")

    assert done.returncode == 1
    assert f"local to host {hostname()} and cannot be changed from another host with the same name" in done.stderr
    assert "shoal pool delete tiny --abandon" in done.stderr
    assert len(up.get_nodes()) == 1


def test_a_lease_released_from_another_host_ends_the_nodes_on_this_one(tiny):
    another_host.required()
    pool = ComputePool("local://tiny?max_nodes=4", holder="airflow:dag/run")
    pool.lease(2, bring_up=True)

    did = another_host.python(
        "import json; from shoal.jobs.cleanup import RunEnd, clean_up_ended_runs\n"
        "print(json.dumps(clean_up_ended_runs('airflow', lambda run: RunEnd('its DAG run ended as failed'))))"
    )

    assert did == [
        "tiny: released the lease of airflow:dag/run: its DAG run ended as failed",
        f'host {hostname()} ends the nodes of pool "tiny" that nothing else needs',
    ]
    wait_until(lambda: reconcile(Store(), "tiny") and pool.describe().state == "down", "this host to end them")


def test_a_pool_whose_host_never_returns_is_deleted_from_another_one(up):
    another_host.required()
    assert len(tagged()) > 0

    kept = another_host.shoal("pool", "delete", "tiny", "--json")
    assert kept.returncode == 1
    assert f"local to host {hostname()}" in json.loads(kept.stdout)["error"]["message"]
    assert len(up.get_nodes()) == 1

    gone = another_host.shoal("pool", "delete", "tiny", "--abandon", "--json")
    assert json.loads(gone.stdout) == {"pool": "tiny", "deleted": True}, gone.stderr
    with pytest.raises(PoolNotFoundError):
        up.describe()
    wait_until(lambda: tagged() == [], "the nodes to find their rows gone")
    sweep(Store())
    nothing_left()


def test_a_pool_here_is_deleted_once_it_is_down_and_not_abandoned(up, tiny):
    with pytest.raises(InvalidArgumentError, match="without --abandon"):
        up.delete(abandon=True)
    says = r"is up \(a lease of python:.*\) and cannot be deleted: first run `shoal pool down tiny`"
    with up.lease(1), pytest.raises(PoolInUseError, match=says):
        up.delete()
    assert len(up.get_nodes()) == 1

    up.down()
    up.delete()

    nothing_left()
    assert list_pools() == []
    assert not (tiny / "pools" / "tiny").exists()


def test_one_pool_that_raises_does_not_end_a_sweep(up, monkeypatch):
    look = TinyBackend.look

    def broken_look(self, spec, nodes):
        assert spec.name != "broken"
        return look(self, spec, nodes)

    monkeypatch.setattr(TinyBackend, "look", broken_look)
    with Store().transaction() as session:
        broken = Pool(
            name="broken", spec={"name": "broken", "backend": "local"}, state=PoolState.UP, host=hostname(),
            host_id=host_id(), min_nodes=1, max_nodes=1, epoch=1, next_node=0, created_at=0.0, touched_at=0.0,
        )  # fmt: skip
        session.add(broken)
        bound_host._write("broken", broken.spec)
    dead = node_rows()[0]
    kill_supervisor(dead)

    did = sweep(Store())

    assert any(sentence.startswith("broken: could not be swept: ") for sentence in did)
    assert f"tiny: ended {dead.name}" in did
    assert dead.id not in folders()
    with Store().transaction() as session:
        session.delete(session.get_one(Pool, "broken"))
