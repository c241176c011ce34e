"""`shoal pool …` without a node; `test_real_pool` has them."""

import time

import pytest

from shoal.cli.output import PoolProgress, describe_counts
from shoal.os_processes import ProcessId
from shoal.pool.status import NodeStatus, PoolStatus
from shoal.state import Store
from shoal.state.schema import Job, Lease, Pool, PoolState, Usage
from tests.cli.conftest import document


def node(number, state, error=None):
    return NodeStatus(f"retrain-{number}", state, number == 0, 1, 0, False, error, f"/logs/retrain-{number}.log")


def status(*, target, active=(), pending=(), failed=(), leaving=()):
    return PoolStatus(
        name="retrain",
        uri="local://retrain",
        state="up",
        host="here",
        is_here=True,
        min_nodes=1,
        max_nodes=4,
        target=target,
        active=tuple(node(n, "ready") for n in active),
        pending=tuple(node(n, "starting") for n in pending),
        failed=tuple(node(n, "failed", "no memory") for n in failed),
        leaving=tuple(node(n, "ending") for n in leaving),
        leases=(),
        last_operation=None,
        reason=None,
    )


def test_no_pool(shoal):
    assert "shoal pool up" in shoal("pool", "list").stdout
    assert document(shoal("pool", "list", "--json").stdout) == {"pools": []}


def test_a_pool_that_is_down(shoal, a_pool):
    assert "down" in shoal("pool", "list").stdout
    assert document(shoal("pool", "list", "--json").stdout)["pools"][0]["name"] == a_pool
    assert "1 to 3 nodes" in shoal("pool", "describe").stdout
    assert document(shoal("pool", "describe", a_pool, "--json").stdout)["state"] == "down"
    assert "no active node" in shoal("pool", "nodes").stdout
    assert document(shoal("pool", "nodes", "--json").stdout) == {"pool": a_pool, "nodes": []}


def test_a_pool_of_a_job_is_listed_as_long_as_it_runs(shoal, a_pool):
    with Store().transaction() as session:
        pool = session.get_one(Pool, a_pool)
        pool.owner = ProcessId.mine().to_json()
        pool.state = PoolState.UP
        holder = "job:xgboost-1f"
        lease = Lease(id="1", pool=a_pool, holder=holder, size=1, epoch=1, ttl=9.0, expires_at=2e9, created_at=1.0)
        lease.exclusive, lease.waiting, lease.queue_number = False, False, 1
        session.add(lease)
    assert "embedded, ends with job xgboost-1f" in " ".join(shoal("pool", "list").stdout.split())
    assert document(shoal("pool", "list", "--json").stdout)["pools"][0]["embedded_in"] == "job xgboost-1f"
    assert "embedded, ends with job xgboost-1f" in " ".join(shoal("pool", "describe", a_pool).stdout.split())
    with Store().transaction() as session:
        session.get_one(Pool, a_pool).state = PoolState.DOWN
    assert document(shoal("pool", "list", "--json").stdout) == {"pools": []}


def test_the_pool_of_the_environment_is_meant(shoal, a_pool):
    assert shoal("pool", "describe", env={"SHOAL_POOL": "another"}).exit_code == 3
    assert shoal("pool", "describe", env={"SHOAL_POOL": a_pool}).exit_code == 0


def test_scaling_never_starts_a_pool(shoal, a_pool):
    result = shoal("pool", "scale", "2", "--json")
    assert result.exit_code == 1
    assert document(result.stdout)["error"]["type"] == "PoolDownError"
    assert "scaling retrain to 2" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["scale", "0"], "expected_cluster_size=0"),
        (["scale", "2", "--min", "3"], "block_until_min_cluster_size=3"),
        (["scale", "2", "--rollback-after", "-1"], "rollback_after_seconds"),
        (["up", "retrain", "--rollback-after", "0"], "rollback_after_seconds=0"),
        (["alter", "retrain", "--min-nodes", "0"], "min_nodes=0"),
        (["alter", "retrain", "--min-nodes", "9"], "max_nodes=3"),
    ],
)
def test_wrong_values_are_refused_by_name(shoal, a_pool, args, said):
    result = shoal("pool", *args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_leases_are_shown_with_their_kind_and_place(shoal, a_pool):
    with Store().transaction() as session:
        session.get_one(Pool, a_pool).state = PoolState.UP
        claims = [("run/1", 2, True, False), ("run/2", 2, True, True), ("run/3", 1, False, True)]
        for number, (holder, size, exclusive, waiting) in enumerate(claims, start=1):
            lease = Lease(
                id=holder, pool=a_pool, holder=holder, size=size, epoch=1, ttl=9.0, expires_at=2e9, created_at=1.0
            )
            lease.exclusive, lease.waiting, lease.queue_number = exclusive, waiting, number
            session.add(lease)
        session.add(Usage(pool=a_pool, holder="run/1", lease_id="run/1", nodes=2, begun_at=time.time() - 50))
    text = " ".join(shoal("pool", "describe").stdout.split())
    assert "run/1 - 2 exclusive granted" in text
    assert "run/2 - 2 exclusive waiting as the next in the queue, 2 of 3 nodes are taken" in text
    assert "run/3 - 1 shared waiting for 1 lease ahead, 2 of 3 nodes are taken" in text
    assert "used in the last 30 days" in text and "run/1 2 1" in text
    shown = document(shoal("pool", "describe", "--json").stdout)
    assert [lease["position"] for lease in shown["leases"]] == [None, 1, 2]
    [used] = shown["usage"]
    assert (used["holder"], used["nodes"], used["job_node_seconds"]) == ("run/1", 2, 0)
    assert used["lease_node_seconds"] >= 100


def test_limits_are_altered(shoal, a_pool):
    changed = document(shoal("pool", "alter", a_pool, "--min-nodes", "2", "--max-nodes", "5", "--json").stdout)
    assert (changed["min_nodes"], changed["max_nodes"]) == (2, 5)


def test_down_of_what_is_down(shoal, a_pool):
    assert document(shoal("pool", "down", "--json").stdout)["state"] == "down"


def test_a_pool_is_deleted_once_no_job_is_unfinished(shoal, a_pool, some_jobs):
    with Store().transaction() as session:
        session.get_one(Job, ("waiting", 1)).pool = a_pool
    refused = shoal("pool", "delete", a_pool)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert 'pool "retrain" is down (unfinished job waiting) and cannot be deleted' in refused.stderr
    assert "`shoal sweep`" in refused.stderr

    assert shoal("sweep").exit_code == 0
    assert document(shoal("pool", "delete", a_pool, "--json").stdout) == {"pool": a_pool, "deleted": True}
    assert document(shoal("pool", "list", "--json").stdout) == {"pools": []}
    assert len(document(shoal("jobs", "list", "--json").stdout)["jobs"]) == 3
    assert shoal("pool", "delete", a_pool).exit_code == 3


def test_sweep_with_nothing_to_do(shoal, a_pool):
    assert shoal("sweep").stdout == "nothing to sweep\n"
    assert document(shoal("sweep", "--json").stdout) == {"did": [], "left": []}


def test_counts_name_what_there_is():
    assert describe_counts(status(target=3, active=[0, 1, 2])) == "3 of 3 nodes active"
    mixed = status(target=3, active=[0], pending=[1], failed=[2], leaving=[3])
    assert describe_counts(mixed) == "1 of 3 nodes active, 1 pending, 1 failed, 1 leaving"


def test_progress_without_a_terminal_is_a_line_for_each_change(capsys):
    with PoolProgress("scaling retrain to 3") as progress:
        progress(status(target=3, active=[0], pending=[1, 2]))
        progress(status(target=3, active=[0], pending=[1, 2]))
        progress(status(target=3, active=[0, 1], failed=[2]))
        progress(status(target=3, active=[0, 1, 3]))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "scaling retrain to 3 …",
        "retrain: 1 of 3 nodes active, 2 pending",
        "node retrain-2 failed: no memory (log: /logs/retrain-2.log)",
        "retrain: 2 of 3 nodes active, 1 failed",
        "retrain: 3 of 3 nodes active",
    ]


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("TERM", "xterm")  # it draws nothing on a dumb one
    with PoolProgress("scaling retrain to 1") as progress:
        progress(status(target=1, active=[0], leaving=[1, 2]))
        assert progress._bar is not None
        assert (progress._bar.tasks[0].completed, progress._bar.tasks[0].total) == (0, 2)
        progress(status(target=1, active=[0], leaving=[2]))
        assert progress._bar.tasks[0].completed == 1
    assert "scaling retrain to 1" in capsys.readouterr().err
