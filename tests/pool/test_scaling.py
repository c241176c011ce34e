"""The contract of `ComputePool` and `scale_cluster`, on tiny nodes under the real supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

import shoal
from shoal.errors import InvalidArgumentError, PoolDownError, PoolNotFoundError, ScaleError
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.backends.interface import NodeRef, PoolRef
from shoal.pool.reconciling import reconcile, sweep
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.private_folders import runtime_root
from shoal.state.schema import Demand, Node, NodeState, Operation, OperationState, Pool
from tests.support import ROOT
from tests.support.pool_processes import node_processes, node_rows, nothing_left, tagged
from tests.support.tiny_backend import TinyBackend
from tests.support.tiny_node import FAIL_FILE, SLOW_FILE
from tests.support.tiny_pools import ForkingTinyBackend
from tests.support.waiting import wait_until

TINY = PoolRef(PoolSpec(name="tiny"), 1, 0.0)


@pytest.fixture
def up(tiny):
    return ComputePool("local://tiny?max_nodes=4").up()


def test_up_scale_and_down(up):
    assert [node["name"] for node in shoal.get_nodes()] == ["tiny-0"]
    assert shoal.scale_cluster(3) is True
    assert shoal.get_nodes("tiny") == [{"name": f"tiny-{n}", "cpus": 1, "gpus": 0} for n in range(3)]
    assert shoal.scale_cluster(1, notebook_name="tiny") is True
    assert len(up.get_nodes()) == 1
    up.down()
    nothing_left()
    assert up.describe().state == "down"
    up.down()  # again: nothing happens
    with pytest.raises(PoolDownError, match="shoal pool up tiny"):
        up.scale(2)
    assert len(ComputePool("tiny").up().get_nodes()) == 1


WRONG = [
    ({"expected_cluster_size": 99}, r"above MAX_NODES=4 of pool \"tiny\".*--max-nodes 99"),
    ({"expected_cluster_size": 0}, "1 or more"),
    ({"expected_cluster_size": -1}, "1 or more"),
    ({"expected_cluster_size": 2.0}, "whole number"),
    ({"expected_cluster_size": True}, "whole number"),
    ({"expected_cluster_size": "3"}, "whole number"),
    ({"expected_cluster_size": 2, "options": {"rollback_after_second": 5}}, "did you mean rollback_after_seconds"),
    ({"expected_cluster_size": 2, "options": {"colour": 1}}, 'unknown option "colour"'),
    ({"expected_cluster_size": 2, "options": {"rollback_after_seconds": 0}}, "rollback_after_seconds"),
    ({"expected_cluster_size": 2, "options": {"rollback_after_seconds": float("nan")}}, "rollback_after_seconds"),
    ({"expected_cluster_size": 2, "options": {"block_until_min_cluster_size": 3}}, "above expected_cluster_size=2"),
    ({"expected_cluster_size": 2, "options": {"block_until_min_cluster_size": 0}}, "block_until_min"),
    ({"expected_cluster_size": 2, "pool_name": "tiny", "notebook_name": "other"}, "differ"),
]


def test_wrong_arguments_are_refused_before_anything_starts(up):
    for arguments, said in WRONG:
        with pytest.raises(InvalidArgumentError, match=said):
            shoal.scale_cluster(**arguments)
    assert up.describe().last_operation.kind == "up"


def test_a_local_pool_cannot_be_abandoned(up):
    with pytest.raises(InvalidArgumentError, match="is local and cannot be abandoned"):
        up.down(abandon=True)
    assert len(up.get_nodes()) == 1


def test_an_unknown_pool_is_named_and_nothing_happens(up):
    for call in (
        lambda: shoal.scale_cluster(2, pool_name="nowhere"),
        lambda: shoal.get_nodes("nowhere"),
        lambda: shoal.describe_pool("nowhere"),
        lambda: shoal.alter_pool("nowhere", max_nodes=3),
    ):
        with pytest.raises(
            PoolNotFoundError, match='pool "nowhere" does not exist or is not authorized; existing pools: tiny'
        ):
            call()


def test_which_pool_is_meant(tiny, monkeypatch):
    with pytest.raises(InvalidArgumentError, match="the store contains no pool"):
        shoal.get_nodes()
    ComputePool("local://a").up()
    assert shoal.describe_pool().name == "a"
    ComputePool("local://b").up()
    with pytest.raises(InvalidArgumentError, match="no pool was named"):
        shoal.get_nodes()
    ComputePool("a").down()
    assert shoal.describe_pool().name == "b"  # the only one that is up
    monkeypatch.setenv("SHOAL_POOL", "b")
    assert shoal.describe_pool().name == "b"
    assert shoal.describe_pool("a").name == "a"


def test_a_pool_is_named_as_notebooks_are(tiny):
    ComputePool("local://my-notebook?max_nodes=2").up()
    assert shoal.scale_cluster(2, notebook_name='"MY_NOTEBOOK"')
    assert len(shoal.get_nodes("my-notebook")) == 2
    assert shoal.scale_cluster(1, pool_name="my-notebook", notebook_name="MY_NOTEBOOK")
    with pytest.raises(InvalidArgumentError, match=r"notebook_name='OTHER' \(pool 'other'\) differ"):
        shoal.scale_cluster(1, pool_name="my-notebook", notebook_name="OTHER")
    with pytest.raises(PoolNotFoundError, match='pool "other" does not exist'):
        shoal.scale_cluster(1, notebook_name="OTHER")


def test_a_pool_that_comes_up_again_has_its_options(tiny):
    pool = ComputePool("local://tiny?max_nodes=5&cpus_per_node=2&idle_timeout=none").up()
    pool.alter(max_nodes=6)
    pool.down()
    assert ComputePool("tiny").up().describe().uri == "local://tiny?max_nodes=6&cpus_per_node=2&idle_timeout=none"
    assert shoal.get_nodes("tiny")[0]["cpus"] == 2


def test_limits_can_be_altered(up):
    shoal.alter_pool("tiny", max_nodes=2)
    with pytest.raises(InvalidArgumentError, match="MAX_NODES=2"):
        up.scale(3)
    shoal.alter_pool("tiny", min_nodes=2)
    wait_until(lambda: reconcile(Store(), "tiny") and len(up.get_nodes()) == 2, "MIN_NODES held")
    with pytest.raises(InvalidArgumentError, match="below MIN_NODES=2"):
        up.scale(1)
    with pytest.raises(InvalidArgumentError, match="above max_nodes"):
        shoal.alter_pool("tiny", min_nodes=3)
    up.scale(2)
    with pytest.raises(InvalidArgumentError, match="scale down first"):
        shoal.alter_pool("tiny", min_nodes=1, max_nodes=1)


def test_a_failure_rolls_back_to_the_demand_before_and_says_why_node_by_node(up, tiny):
    up.scale(2)
    (tiny / FAIL_FILE).write_text("quota exceeded")
    with pytest.raises(ScaleError) as caught:
        up.scale(4)
    assert "rolled back to 2" in str(caught.value)
    assert set(caught.value.nodes.values()) == {"RuntimeError: quota exceeded"}
    status = up.describe()
    assert (status.target, len(status.active), status.pending, status.failed) == (2, 2, (), ())
    assert len(node_rows()) == 2
    assert "rolled back" in status.reason


def test_a_deadline_that_is_too_short_rolls_back(up):
    with pytest.raises(ScaleError, match="at the deadline; rolled back to 1"):
        up.scale(3, options={"rollback_after_seconds": 0.01})
    assert len(node_rows()) == 1


def test_a_node_that_was_not_up_at_the_deadline_is_named(up, tiny):
    (tiny / SLOW_FILE).touch()
    with pytest.raises(ScaleError) as error:
        up.scale(2, options={"rollback_after_seconds": 4})
    assert list(error.value.nodes) == ["tiny-1"]
    assert "at the deadline" in error.value.nodes["tiny-1"]


def test_a_pool_that_does_not_come_up_leaves_nothing(tiny):
    (tiny / FAIL_FILE).write_text("no Ray here")
    with pytest.raises(ScaleError, match="all nodes that it had started were ended"):
        ComputePool("local://tiny").up()
    nothing_left()
    assert ComputePool("tiny").describe().state == "down"


def test_asynchronous_scaling_returns_at_once_and_is_carried_out_by_whoever_reconciles(up):
    assert up.scale(3, is_async=True) is True
    assert len(up.get_nodes()) == 1  # reading never scales
    wait_until(lambda: reconcile(Store(), "tiny") and len(up.get_nodes()) == 3, "3 nodes")
    wait_until(lambda: reconcile(Store(), "tiny") and up.describe().last_operation.state == "succeeded", "its end")


def test_block_until_min_cluster_size_settles_at_what_it_has(up, tiny):
    up.scale(2)
    (tiny / FAIL_FILE).write_text("spot market is empty")
    assert up.scale(4, options={"block_until_min_cluster_size": 2}) is True
    wait_until(lambda: reconcile(Store(), "tiny") and up.describe().last_operation.state == "succeeded", "its end")
    assert up.describe().target == 2
    wait_until(lambda: reconcile(Store(), "tiny") and len(node_rows()) == 2, "leftovers gone")


def test_a_dead_node_is_noticed_at_once_and_replaced(up):
    up.scale(2)
    worker = next(node for node in node_rows() if not node.is_head)
    ProcessId.from_json(worker.supervisor).signal(signal.SIGKILL)
    wait_until(lambda: len(up.get_nodes()) == 1, "the loss noticed by reading alone")
    # Its children live on until somebody reconciles; itself may take the kernel a moment to end.
    wait_until(lambda: len(node_processes(worker)) == 3, "its supervisor's end")
    wait_until(lambda: reconcile(Store(), "tiny") and len(up.get_nodes()) == 2, "its replacement")
    assert node_processes(worker) == []


def test_a_node_whose_raylet_dies_is_ended_and_replaced(up):
    up.scale(2)
    worker = next(node for node in node_rows() if not node.is_head)
    # Another supervisor that was started for the same row takes its time on a busy machine to see that it has no right.
    wait_until(lambda: len(node_processes(worker)) == 4, "its supervisor and three children alone")
    children = [process for process in node_processes(worker) if process.pid != worker.supervisor["pid"]]
    children[0].signal(signal.SIGKILL)
    wait_until(lambda: not ProcessId.from_json(worker.supervisor).alive(), "its supervisor gone")
    assert node_processes(worker) == []
    wait_until(lambda: reconcile(Store(), "tiny") and len(up.get_nodes()) == 2, "its replacement")


def test_a_busy_node_is_drained_before_it_goes(up, tiny):
    up.scale(3)
    (tiny / "busy-tiny-2").touch()
    wait_until(lambda: any(node.busy for node in node_rows()), "the supervisor's report")
    up.scale(2)
    assert [node["name"] for node in up.get_nodes()] == ["tiny-0", "tiny-2"]  # the idle one went
    up.scale(1, is_async=True)
    reconcile(Store(), "tiny")
    assert [node.state for node in up.describe().leaving] == ["draining"]
    reconcile(Store(), "tiny")
    assert len(node_rows()) == 2
    (tiny / "busy-tiny-2").unlink()
    wait_until(lambda: reconcile(Store(), "tiny") and len(node_rows()) == 1, "the drained node's end")


def test_two_operations_at_once_each_end_with_success_or_a_clear_refusal(up):
    outcomes: dict[int, object] = {}

    def scale(size: int) -> None:
        try:
            outcomes[size] = ComputePool("tiny").scale(size)
        except ScaleError as error:
            outcomes[size] = error

    threads = [threading.Thread(target=scale, args=(size,)) for size in (4, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store().transaction() as session:
        final = session.get_one(Demand, "tiny").size
        assert all(row.state is not OperationState.OPEN for row in session.query(Operation))
    assert outcomes[final] is True
    assert all(outcome is True or "newer operation" in str(outcome) for outcome in outcomes.values())
    assert len(up.get_nodes()) == final


def test_rolling_back_one_operation_never_restores_what_another_has_replaced(up, tiny):
    """2, 3 and 4 asked one on top of the other, then 3 is withdrawn: a failing 4 goes back to 2, and that to 1."""
    from shoal.pool.journal import commands
    from shoal.pool.journal.advance import withdraw
    from shoal.pool.spec import ScaleOptions

    def request(size: int) -> str:
        with Store().transaction() as session:
            options = ScaleOptions(rollback_after_seconds=60)
            return commands.scale(session, "tiny", size, holder="test", options=options, now=1e9)

    def give_up(operation_id: str) -> None:
        with Store().transaction() as session:
            withdraw(session, operation_id, "given up", 1e9)

    two, three, four = request(2), request(3), request(4)
    for operation_id, target in ((three, 4), (four, 2), (two, 1)):
        give_up(operation_id)
        assert up.describe().target == target


def test_what_has_succeeded_is_not_rolled_back(up):
    """Its caller is interrupted when the sizes are right already."""
    from shoal.pool.journal.advance import withdraw

    assert up.scale(2)
    succeeded = up.describe().last_operation.id
    with Store().transaction() as session:
        assert not withdraw(session, succeeded, "given up", 1e9)
    assert up.describe().target == 2


def test_an_interrupt_rolls_back(up):
    script = "from shoal.pool.api import ComputePool; ComputePool('tiny').scale(3)"
    prelude = (
        "from shoal.pool import reconciling; reconciling.ensure_running = lambda: None\n"
        "from shoal.pool.options.local import LocalOptions\n"
        "LocalOptions.backend_class = 'tests.support.tiny_backend:TinyBackend'\n"
    )
    process = subprocess.Popen([sys.executable, "-c", prelude + script], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(node_rows()) == 3, "its intents")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said
    assert len(node_rows()) == 1
    assert up.describe().target == 1


def test_an_interrupt_while_it_is_journaled_rolls_back_too(up, monkeypatch):
    from shoal.pool.journal import commands

    request = commands.scale

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return request(*args, **kwargs)

    monkeypatch.setattr(commands, "scale", interrupted)
    with pytest.raises(KeyboardInterrupt):
        up.scale(3)
    assert up.describe().target == 1
    assert up.describe().last_operation.state == "rolled_back"


def test_a_supervisor_whose_row_is_gone_starts_nothing(up):
    """A process paused between intent and act, that wakes up after its row was swept away."""
    TinyBackend().start(TINY, [NodeRef("0123456789", "ghost", "tiny", 1, None)])
    wait_until(lambda: "is not started" in (_log("ghost")), "its refusal")
    assert len(tagged()) == 3


def test_a_supervisor_of_another_life_of_the_pool_starts_nothing(up, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ForkingTinyBackend, "start", lambda self, pool, nodes: None)
        up.scale(2, is_async=True)
        reconcile(Store(), "tiny")
    planned = node_rows()[1]
    ForkingTinyBackend().start(TINY, [replace(NodeRef.of(planned), epoch=planned.epoch - 1)])
    wait_until(lambda: "is not started" in _log(planned.name), "its refusal")
    assert node_rows()[1].state is NodeState.PLANNED


@pytest.mark.parametrize(
    ("field", "value"),
    [("supervisor", ProcessId("another boot", 1, 1, "this host").to_json()), ("epoch", 7)],
    ids=["one", "life"],
)
def test_a_node_whose_row_was_given_to_another_ends_itself(up, field, value):
    [node] = node_rows()
    with Store().transaction() as session:
        setattr(session.get_one(Node, node.id), field, value)
    wait_until(lambda: node_processes(node) == [], "its end")
    assert node_rows()[0].state is NodeState.READY  # it wrote nothing into a row that is not its own


def test_two_supervisors_for_one_row_and_one_starts(up):
    """Two processes that both act on the same intent."""
    up.scale(2)
    worker = next(node for node in node_rows() if not node.is_head)
    TinyBackend().start(TINY, [NodeRef.of(worker)])
    wait_until(lambda: "is not started" in _log(worker.name), "the second one's refusal")
    with Store().transaction() as session:
        assert session.get_one(Node, worker.id).supervisor == worker.supervisor


def test_a_removed_home_ends_its_nodes(up):
    """`rm -rf $SHOAL_HOME` under a running pool."""
    pids = [ProcessId.of(pid) for pid in tagged()]
    os.rename(Store().url.removeprefix("sqlite:///"), f"{os.environ['SHOAL_HOME']}/moved.db")
    wait_until(lambda: not any(process and process.alive() for process in pids), "the nodes' end")
    os.rename(f"{os.environ['SHOAL_HOME']}/moved.db", Store(migrate=False).url.removeprefix("sqlite:///"))
    assert sweep(Store())


def test_nodes_of_a_removed_home_leave_no_folder(up, fresh_home):
    """The record of where they are went with the home: nobody else would find them."""
    root = runtime_root()
    assert list(root.glob("*/"))
    pids = [ProcessId.of(pid) for pid in tagged()]
    away = fresh_home.rename(fresh_home.with_name(f"{fresh_home.name}-away"))
    wait_until(lambda: not any(process and process.alive() for process in pids), "the nodes' end")
    assert list(root.glob("*/")) == []
    away.rename(fresh_home)
    assert sweep(Store())


def test_a_pool_of_another_host_is_refused_by_name(up, monkeypatch):
    with Store().transaction() as session:
        pool = session.get_one(Pool, "tiny")
        mine = pool.host, pool.host_id
        pool.host, pool.host_id = "elsewhere", "0" * 16
    with pytest.raises(PoolDownError, match="local to host elsewhere"):
        up.scale(2)
    with Store().transaction() as session:
        pool = session.get_one(Pool, "tiny")
        pool.host, pool.host_id = mine


def _log(name: str) -> str:
    from shoal.pool.backends.local.backend import log_path

    path = log_path("tiny", name)
    return path.read_text() if path.exists() else ""
