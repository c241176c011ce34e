"""`ray://`: clusters that someone else runs, static ones and ones with Ray's own autoscaler."""

from __future__ import annotations

import itertools
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from unittest.mock import MagicMock

import httpx
import pytest

from shoal import RunConfig
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, get_context
from shoal.errors import InvalidArgumentError, PoolUnreachableError, ScaleError
from shoal.jobs import JobSpec, submit
from shoal.jobs.reconcile.look import JobClient
from shoal.pool.api import ComputePool
from shoal.pool.backends import ray_http
from shoal.pool.backends.interface import PoolRef
from shoal.pool.backends.ray.backend import Cluster, RayBackend
from shoal.pool.backends.ray_http import RayHead, RayJob, ScriptRunner
from shoal.pool.reconciling import reconcile, sweep
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from tests.pool.backends.foreign import ForeignCluster
from tests.support.homes import new_home
from tests.support.pool_processes import node_rows, nothing_left
from tests.support.two_node_cluster import COLUMNS, ROWS, write_rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def attached_pool(static_cluster) -> Iterator[ComputePool]:
    """One pool for several tests, in a home of its own."""
    with new_home(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
        patch.setattr("shoal.pool.backends.preflight.preflight", lambda *_: [])
        pool = ComputePool(static_cluster.uri(max_nodes=4)).up()
        yield pool
        pool.down()
        nothing_left()


@pytest.fixture
def attached(attached_pool) -> ComputePool:
    """The pool with one node and without a lease."""
    attached_pool.scale(1)
    return attached_pool


def test_more_than_a_static_cluster_has_is_refused_at_once(attached):
    before = attached.describe().last_operation
    for ask in (attached.scale, attached.lease):
        with pytest.raises(InvalidArgumentError, match=r"static Ray cluster of 2 nodes.*cannot have 3"):
            ask(3)
    with pytest.raises(InvalidArgumentError, match="static Ray cluster of 2 nodes"):
        attached.alter(min_nodes=3)
    assert attached.describe().last_operation == before
    assert attached.describe().leases == ()


def test_one_that_is_too_small_from_the_start_is_not_attached(alone, static_cluster):
    with pytest.raises(InvalidArgumentError, match=r"static Ray cluster of 2 nodes.*cannot have 3"):
        ComputePool(static_cluster.uri(min_nodes=3)).up()
    assert node_rows() == []


def test_leases_stand_beside_the_base_demand_and_the_largest_wins(attached, static_cluster):
    other = ComputePool("foreign", holder="python:other@host/1")
    mine = attached.lease(2)
    other.lease(1)
    assert (attached.describe().target, len(attached.get_nodes())) == (2, 2)
    mine.release()
    assert (attached.describe().target, len(attached.get_nodes())) == (1, 1)
    assert other.release()
    assert len(Cluster(PoolSpec.parse(static_cluster.uri())).nodes()) == 2


def test_a_pool_that_a_lease_attached_is_forgotten_with_it(alone, static_cluster):
    with ComputePool(static_cluster.uri()).lease(2, bring_up=True):
        assert len(ComputePool("foreign").get_nodes()) == 2
    assert ComputePool("foreign").describe().state == "down"
    assert static_cluster.alive()


def test_any_host_can_act_on_it(attached, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert attached.describe().host == ""
    assert attached.scale(2) is True


def test_its_endpoint_takes_jobs(attached):
    endpoint = attached.endpoint()
    assert endpoint.versions == {"python": platform.python_version()}
    client = JobClient(endpoint.api, endpoint.token())
    client.submit(["echo", "taken"], "mine-1", {})
    wait_until(lambda: client.status("mine-1").ended, "the job", seconds=60)
    assert "taken" in client.logs("mine-1")
    client.delete("mine-1")


@pytest.mark.long
def test_it_trains(alone, tmp_path):
    """shoal is installed on the cluster's nodes, and the store in their environment, as the docs ask."""
    write_rows(tmp_path / "rows")
    home = {"SHOAL_HOME": os.environ["SHOAL_HOME"], "SHOAL_PYTHON": sys.executable}
    with ForeignCluster("static", workers=1, environment=home) as cluster:
        pool = ComputePool(cluster.uri(shared_folders=f"{tmp_path},{os.environ['SHOAL_HOME']}")).up()
        spec = JobSpec(
            dataset={"paths": [str(tmp_path / "rows")]}, input_cols=COLUMNS, label_col="y", n_estimators=5,
            run_config={"pool_name": "foreign"}, scaling_config={"num_workers": 2}, tracking=None,
        )  # fmt: skip
        with pool.lease(2):
            result = submit(spec).wait()
        assert (result.rows, result.num_workers) == (ROWS, 2)
        pool.down()


def claimed(pool):
    """Reconcile the pool, and return Ray's ids of its nodes; None for a node that waits for one of the cluster."""
    reconcile(Store(), pool.name)
    return {(row.endpoint or {}).get("ray_node_id") for row in node_rows()}


@pytest.mark.long
def test_an_announced_end_is_told_to_the_job_and_the_node_is_replaced_before_it_goes(alone, tmp_path):
    def waits_to_be_told():
        context = get_context()
        context.get_metrics_reporter().log_metrics({"begun": 1})
        wait_until(context.should_checkpoint, "the node's announced end", 120)
        context.save_checkpoint({"step": 1})
        wait_until(replaced.exists, "the test to see another node", 240)

    replaced = tmp_path / "replaced"
    home = {"SHOAL_HOME": os.environ["SHOAL_HOME"], "SHOAL_PYTHON": sys.executable}
    with ForeignCluster("static", workers=1, environment=home) as cluster:
        pool = ComputePool(cluster.uri(shared_folders=os.environ["SHOAL_HOME"], max_nodes=3)).up()
        with pool.lease(2):
            before = claimed(pool)
            config = RunConfig(pool_name="foreign", tracking=None)
            call = PyTorchDistributor(waits_to_be_told, PyTorchScalingConfig(num_nodes=2), config).submit()
            wait_until(lambda: call.job.status().progress, "the function", 120)
            cluster.join()
            cluster.drain()
            wait_until(
                lambda: len(now := claimed(pool)) == len(now & before) + 1 and None not in now, "another node", 120
            )
            replaced.touch()
            call.result()
            wait_until(lambda: len(claimed(pool)) == 2, "the claim on the leaving node to end", 60)
            assert "will shut down soon" in "\n".join(call.logs())
        pool.down()


USES_THE_FIRST_WORKER = """
import sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote
def work_of_others():
    time.sleep(600)

ray.init(sys.argv[1])
[node] = [node["NodeID"] for node in ray.nodes() if node["NodeName"] == "worker-0"]
there = NodeAffinitySchedulingStrategy(node, soft=False)
ray.get(work_of_others.options(scheduling_strategy=there).remote())
"""


@pytest.mark.long
def test_without_a_job_of_shoal_a_drained_node_is_replaced_as_soon_as_it_has_no_work(alone):
    """Over HTTP, Ray shows no drain. If it does one day, `RayBackend.look` can report it."""
    with ForeignCluster("static", workers=2) as cluster:
        pool = ComputePool(cluster.uri(max_nodes=3)).up()
        with pool.lease(2):
            before = claimed(pool)
            client = JobClient(cluster.api, cluster.token_file.read_text())
            client.submit(["python", "-c", USES_THE_FIRST_WORKER, cluster.gcs], "other-1", {})
            headers = {"Authorization": f"Bearer {cluster.token_file.read_text()}"}

            def answer(path):
                return httpx.get(f"{cluster.api}{path}", headers=headers, timeout=30).raise_for_status().text

            running = "/api/v0/tasks?filter_keys=state&filter_predicates=%3D&filter_values=RUNNING"
            wait_until(lambda: "work_of_others" in answer(running), "work on the node", 120)
            cluster.drain()
            for path in ("/api/v0/nodes?detail=true", "/nodes?view=summary", "/api/cluster_status", "/events"):
                assert "drain" not in answer(path).lower()
            assert claimed(pool) == before

            client.stop("other-1")

            wait_until(
                lambda: len(now := claimed(pool)) == 2 and len(now & before) == 1 and None not in now,
                "another node",
                60,
            )
        pool.down()


def nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"http://127.0.0.1:{held.getsockname()[1]}"


def test_what_is_wrong_with_the_address_or_the_token_is_said(alone, static_cluster, tmp_path):
    wrong = tmp_path / "token"
    wrong.write_text("no")
    for options, said in [
        ({"address": nobody_listens()}, "no Ray cluster answers at .*check that the cluster is up"),
        ({"address": f"http://{static_cluster.gcs}"}, "does not answer"),
        ({"address": f"{static_cluster.api}/elsewhere"}, "is not the head of a Ray cluster"),
        ({"token_file": wrong}, f"refused the token in {re.escape(str(wrong))}: write this cluster's token"),
        ({"token_file": None}, "refused a request without a token: give token_file="),
        ({"token_file": tmp_path / "none"}, "cannot be read: No such file"),
    ]:
        with pytest.raises(PoolUnreachableError, match=said):
            ComputePool(static_cluster.uri(**options)).up()
    assert node_rows() == []


def test_a_cluster_that_has_gone_shows_and_can_be_forgotten_or_abandoned(alone, monkeypatch):
    with ForeignCluster("static", workers=0) as cluster:
        pool, silent = (ComputePool(cluster.uri(name)).up() for name in ("foreign", "silent"))
        # Without a monitor, a Ray job looks for the autoscaler.
        with pytest.raises(InvalidArgumentError, match=r"static Ray cluster of 1 nodes.*cannot have 2"):
            pool.scale(2)
    status = pool.describe()
    assert (status.active, status.reason) == ((), status.failed[0].error)
    assert "no Ray cluster answers" in status.reason
    reconcile(Store(), pool.name)  # no news is no loss: it may be back in a moment
    assert [node.state.value for node in node_rows() if node.pool == pool.name] == ["ready"]
    pool.down()
    assert [node.pool for node in node_rows()] == [silent.name]

    # Nobody can say what an autoscaler that is silent holds: it is asked again and again, until a user says it is gone.
    monkeypatch.setattr("shoal.pool.waiting.DOWN_PATIENCE", 2.0)
    monkeypatch.setitem(RayHead.__init__.__kwdefaults__, "timeout_s", 0.3)
    with socket.create_server(
        ("127.0.0.1", int(cluster.api.rpartition(":")[2]))
    ):  # takes connections, and says nothing
        with pytest.raises(ScaleError, match=r"may still keep nodes for this pool.*does not answer.*--abandon"):
            silent.down()
        silent.down(abandon=True)
    assert (silent.describe().state, node_rows()) == ("down", [])


def test_a_monitor_that_only_reports_is_no_autoscaler(static_cluster):
    """`ray start --head` always brings one."""
    assert Cluster(PoolSpec.parse(static_cluster.uri())).has_autoscaler() is False


@pytest.mark.parametrize(
    ("version", "most", "other_size"),
    [
        pytest.param("v1", 3, 2, marks=pytest.mark.long),
        pytest.param("v2", 3, 2, marks=pytest.mark.long),
        ("v2", 2, 1),  # one worker, which Ray takes a while to start and to end
    ],
)
def test_the_autoscaler_is_asked_for_the_largest_claim_and_told_when_it_goes(alone, version, most, other_size):
    with ForeignCluster(version, workers=0) as cluster:
        spec = PoolSpec.parse(cluster.uri(max_nodes=4))
        seen = Cluster(spec)
        # The monitor's first report; version 2 reports to Ray's GCS alone.
        wait_until(lambda: seen.autoscaling() or version == "v2", "the autoscaler")
        pool = ComputePool(spec).up()
        other = ComputePool(spec.name, holder="python:other@host/1")
        assert len(pool.get_nodes()) == 1
        lease = pool.lease(most)
        other.lease(other_size)
        assert [node.is_head for node in pool.describe().active] == [True, *[False] * (most - 1)]
        assert len(seen.nodes()) == most
        lease.release()
        wait_until(lambda: len(seen.nodes()) == other_size, "Ray to end what nobody asks for", seconds=120)
        # A process that decided to grow, and was held up until now.
        late = PoolRef(spec, 4, 0.0)
        RayBackend().start(late, [])
        job = next(job for job in seen.jobs() if "-0.000000-" in job)
        assert seen.scripts.answer(job) == {"autoscaler": version, "asked": other_size}
        other.release()
        wait_until(lambda: len(seen.nodes()) == 1, "Ray to end the last worker", seconds=120)
        pool.down()
        assert seen.jobs() == []
        assert len(seen.nodes()) == 1
        assert sweep(Store()) == []


@pytest.mark.parametrize(("kinds", "expected"), [(["node_a", "node_b"], False), (["node_a", "cpu_worker"], True)])
def test_a_heads_status_that_names_its_node_types_needs_no_job_to_find_the_autoscaler(monkeypatch, kinds, expected):
    types = {f"10.0.0.{number}": kind for number, kind in enumerate(kinds)}
    status = {"data": {"clusterStatus": {"autoscalerReport": {"nodeTypeMapping": types}}}}
    asked = []
    monkeypatch.setattr(RayHead, "get", lambda _, path, read: asked.append(path) or read(status))
    monkeypatch.setattr(RayHead, "submit", lambda *_, **__: pytest.fail("a job was submitted"))
    assert Cluster(PoolSpec.parse("ray://foreign?address=http://127.0.0.1:1")).has_autoscaler() is expected
    assert asked == ["/api/cluster_status"]


def test_a_small_job_is_lost_only_if_the_head_does_not_know_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    head = MagicMock(logs=MagicMock(return_value='{"autoscaler": null}'))
    script = ScriptRunner(head, "the Ray cluster at http://h", "p")
    head.status.side_effect = [None, RayJob("RUNNING", None, None), None, RayJob("SUCCEEDED", None, 0)]
    assert script.answer("look") == {"autoscaler": None}
    monkeypatch.setattr(ray_http, "CLUSTER_UNKNOWN_PATIENCE", 0.0)
    head.status.side_effect = itertools.repeat(None)
    with pytest.raises(PoolUnreachableError, match="has lost shoal's job look"):
        script.answer("look")
