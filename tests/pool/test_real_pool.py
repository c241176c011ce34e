"""One real case per operation: Ray nodes on loopback, scaled 1 -> 3 -> 1."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import psutil
import pytest
import ray

from shoal.errors import InvalidArgumentError
from shoal.os_processes import ProcessId
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.backend import node_folder
from shoal.pool.backends.versions import TESTED_RAY
from shoal.pool.spec import PoolSpec
from shoal.state.schema import Node
from tests.support.pool_processes import node_processes, node_rows, processes_of_home
from tests.support.waiting import wait_until

pytestmark = pytest.mark.ray


def listeners(pids: set[int]) -> dict[int, set[str]]:
    """Addresses that each of some processes listens on."""
    said = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    found: dict[int, set[str]] = {}
    for line in said.splitlines():
        for pid in pids:
            if f"pid={pid}," in line:
                found.setdefault(pid, set()).add(line.split()[3].rpartition(":")[0])
    return found


def test_grows_and_shrinks(real_pool):
    real_pool.scale(1)
    assert real_pool.scale(3) is True
    nodes = real_pool.get_nodes()
    assert [(node["cpus"], node["gpus"]) for node in nodes] == [(1, 0)] * 3
    leaving = [node for node in node_rows() if not node.is_head]
    assert real_pool.scale(1) is True
    for node in leaving:
        assert processes.of_node(node.id, [node_folder(node.id)], ProcessId.from_json(node.supervisor)) == []
        assert not node_folder(node.id).exists()


def test_every_listener_is_on_loopback_and_the_token_is_asked_for(pool):
    pids = {process.pid for node in node_rows() for process in node_processes(node)}
    heard = listeners(pids)
    assert len(heard) > 5
    assert set().union(*heard.values()) <= {"127.0.0.1", "[::ffff:127.0.0.1]"}
    endpoint = pool.endpoint()
    body = {"entrypoint": "true"}
    assert httpx.post(f"{endpoint.api}/api/jobs/", json=body, timeout=30).status_code == 401
    wrong = {"Authorization": "Bearer wrong"}
    assert httpx.post(f"{endpoint.api}/api/jobs/", json=body, headers=wrong, timeout=30).status_code in (401, 403)
    assert endpoint.token_path.stat().st_mode & 0o777 == 0o600
    right = {"Authorization": f"Bearer {endpoint.token()}"}
    assert httpx.get(f"{endpoint.api}/api/jobs/unknown", headers=right, timeout=30).status_code == 404


def test_no_listener_gives_metrics_without_the_token(pool):
    pids = {process.pid for node in node_rows() for process in node_processes(node)}
    ports = {
        listener.laddr.port
        for listener in psutil.net_connections("tcp")
        if listener.pid in pids and listener.status == psutil.CONN_LISTEN
    }
    assert len(ports) > 5

    def said(port: int) -> str:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        except httpx.HTTPError:  # speaks something else than HTTP
            return ""

    with ThreadPoolExecutor(len(ports)) as threads:
        assert [page[:80] for page in threads.map(said, ports) if "# TYPE" in page] == []


def test_a_driver_connects_and_a_busy_node_is_reported(pool):
    """What `Endpoint.driver_environment` gives is all that a Ray driver on this host needs."""
    script = """
import ray, sys
ray.init()
@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
class Holder:
    def name(self): return ray.get_runtime_context().get_node_id()
holders = [Holder.remote() for _ in range(3)]
names = [node["NodeName"] for node in ray.nodes() if node["Alive"]]
print(len(set(ray.get([h.name.remote() for h in holders]))), *names, flush=True)
sys.stdin.read()
"""
    code = (
        "import os, subprocess, sys; from shoal import ComputePool\n"
        "env = {**os.environ, **ComputePool('tests').endpoint().driver_environment()}\n"
        f"os.execve(sys.executable, [sys.executable, '-c', {script!r}], env)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        found, *names = driver.stdout.readline().split()
        assert found == "3"
        assert {node["name"] for node in pool.get_nodes()} == set(names)
        wait_until(lambda: all(node.busy for node in node_rows()), "every node reported busy")
    finally:
        driver.communicate(input="", timeout=60)
    wait_until(lambda: not any(node.busy for node in node_rows()), "every node idle again")


def test_a_killed_node_is_replaced_by_the_detached_reconciler(pool):
    victim = next(node for node in node_rows() if not node.is_head)
    ProcessId.from_json(victim.supervisor).signal(signal.SIGKILL)
    wait_until(lambda: victim.name not in {node["name"] for node in pool.get_nodes()}, "the loss")
    wait_until(lambda: len(pool.get_nodes()) == 3, "the replacement", seconds=120)
    assert processes.of_node(victim.id, [node_folder(victim.id)], ProcessId.from_json(victim.supervisor)) == []


def test_a_refused_size_changes_nothing(pool):
    with pytest.raises(InvalidArgumentError, match="MAX_NODES=4"):
        pool.scale(99)
    assert len(pool.get_nodes()) == 3


def test_the_private_api_is_the_one_that_was_tested():
    """`raylet` builds on `ray._private.node.Node`: look at a new minor before `TESTED_RAY` names it."""
    import inspect

    from ray._private.node import Node

    assert ray.__version__.startswith(f"{TESTED_RAY}.")
    assert {"head", "shutdown_at_exit", "spawn_reaper"} <= set(inspect.signature(Node.__init__).parameters)
    for name in ("gcs_address", "webui_url", "node_id", "dead_processes", "kill_all_processes", "get_gcs_client"):
        assert hasattr(Node, name)


def test_status_is_json(pool):
    status = json.loads(json.dumps(pool.describe().to_dict()))
    assert (status["state"], status["target"], len(status["active"])) == ("up", 3, 3)


class _SilentHeadsNode:
    """Stands for Ray's `Node`: its head answers as `answers` says."""

    gcs_address = "127.0.0.1:1"
    node_id = "ab"
    answers = True

    def __init__(self, *_, **__):
        pass

    def dead_processes(self):
        return []

    def get_gcs_client(self):
        return self

    def get_cluster_resource_state(self, timeout_s):
        from ray.core.generated import autoscaler_pb2

        if not self.answers:
            raise ray.exceptions.RpcError("unavailable")
        return autoscaler_pb2.GetClusterResourceStateReply().SerializeToString()


def test_a_head_does_not_run_rays_dashboard(pool):
    assert any("gcs_server" in command for command in processes_of_home())
    assert not any("dashboard.py" in command for command in processes_of_home())


@pytest.mark.parametrize("head", ["127.0.0.1:1", None], ids=["worker node", "head"])
def test_a_node_whose_head_stays_silent_is_given_up_and_counts_as_busy_until_then(monkeypatch, tmp_path, head):
    from shoal.pool.backends.local import raylet

    now = 100.0
    for name in ("Node", "_NodeWithoutDashboard"):
        monkeypatch.setattr(raylet, name, _SilentHeadsNode)
    monkeypatch.setattr(raylet, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(raylet, "waited_since", lambda moment: now - moment)
    node = raylet.Raylet(Node(name="n", cpus=1, gpus=0), PoolSpec(name="silent"), head, tmp_path)
    assert not node.busy()
    node._node.answers = False
    assert node.busy()
    now += raylet.HEAD_PATIENCE
    assert node.busy()
    assert node.dead() is None
    node._node.answers = True
    assert not node.busy()
    node._node.answers = False
    now += 1
    assert node.busy()
    now += raylet.HEAD_PATIENCE
    assert node.dead() is None  # the patience begins anew with each answer
    now += 1
    assert node.dead() == (head and f"the head at {head} cannot be reached")
