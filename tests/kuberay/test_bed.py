"""The test bed itself: what a cluster of it does, a real one does, too."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.kuberay.agent.pod import ORDER
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import RAY_IMAGE, ControlPlane
from tests.kuberay.manifests import pod, ray_cluster
from tests.support.waiting import wait_until

client = pytest.importorskip("kubernetes.client")

GROUP = ("ray.io", "v1")
CLUSTER = "ray.io/cluster"


@pytest.fixture
def core(cluster: Cluster) -> Iterator[Any]:
    with cluster.client() as made:
        yield client.CoreV1Api(made)


@pytest.fixture
def custom(cluster: Cluster) -> Iterator[Any]:
    with cluster.client() as made:
        yield client.CustomObjectsApi(made)


def wait_for_pod(core: Any, namespace: str, name: str, condition: Callable[[Any], Any], what: str) -> Any:
    return wait_until(lambda: condition(core.read_namespaced_pod(name, namespace)), what, seconds=300, every=0.2)


def is_ready(found: Any) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in found.status.conditions or ())


def waiting_reason(found: Any) -> str | None:
    states = [status.state for status in found.status.container_statuses or ()]
    return states[0].waiting.reason if states and states[0].waiting else None


def test_an_image_that_nobody_has_cannot_be_pulled(core: Any, cluster: Cluster, namespace: str):
    core.create_namespaced_pod(namespace, pod("lost", "shoal.test/nobody-has:1", "true"))

    found = wait_for_pod(
        core, namespace, "lost", lambda seen: waiting_reason(seen) == "ImagePullBackOff" and seen, "the back-off"
    )

    assert found.status.phase == "Pending"
    assert "shoal.test/nobody-has:1" in found.status.container_statuses[0].state.waiting.message


def test_a_container_over_its_memory_limit_is_killed(core: Any, cluster: Cluster, namespace: str):
    hungry = pod("hungry", cluster.image, "exec python -c 'bytearray(300 << 20)'")
    hungry["spec"]["containers"][0]["resources"] = {"limits": {"memory": "100Mi"}}
    core.create_namespaced_pod(namespace, hungry)

    found = wait_for_pod(core, namespace, "hungry", lambda seen: seen.status.phase == "Failed" and seen, "the end")

    ended = found.status.container_statuses[0].state.terminated
    assert (ended.reason, ended.exit_code) == ("OOMKilled", 137)


def test_a_container_that_fails_is_restarted_with_its_log_kept(core: Any, cluster: Cluster, namespace: str):
    core.create_namespaced_pod(namespace, pod("crash", cluster.image, "echo the cause; exit 3", restartPolicy="Always"))

    found = wait_for_pod(
        core, namespace, "crash", lambda seen: waiting_reason(seen) == "CrashLoopBackOff" and seen, "the back-off"
    )

    assert found.status.container_statuses[0].last_state.terminated.exit_code == 3
    for previous in (False, True):
        assert "the cause" in core.read_namespaced_pod_log("crash", namespace, previous=previous)


def test_a_pod_gets_secrets_fields_names_and_a_token_of_its_account(core: Any, cluster: Cluster, namespace: str):
    core.create_namespaced_secret(namespace, {"metadata": {"name": "word"}, "stringData": {"it": "open sesame"}})
    core.create_namespaced_service(
        namespace,
        {
            "metadata": {"name": "asker"},
            "spec": {"clusterIP": "None", "selector": {"app": "asker"}, "ports": [{"port": 80}]},
        },
    )
    command = (
        'echo "$WORD at $ADDRESS"; until getent hosts asker; do sleep 0.1; done; touch /ready; '
        "curl -s --cacert /var/run/secrets/kubernetes.io/serviceaccount/ca.crt -o /dev/null -w '%{http_code}' "
        '-H "Authorization: Bearer $(cat /var/run/secrets/kubernetes.io/serviceaccount/token)" '
        "https://kubernetes.default.svc/api/v1/namespaces/$SPACE/pods; exec sleep infinity"
    )
    asker = pod("asker", cluster.image, command)
    asker["metadata"]["labels"] = {"app": "asker"}
    asker["spec"]["containers"][0] |= {
        "env": [
            {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "word", "key": "it"}}},
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "SPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        ],
        "readinessProbe": {"exec": {"command": ["test", "-e", "/ready"]}, "periodSeconds": 1},
    }
    core.create_namespaced_pod(namespace, asker)

    # The name leads to the pod before it is ready only if the service says so: this one is waited for by its file.
    core.patch_namespaced_service("asker", namespace, {"spec": {"publishNotReadyAddresses": True}})
    found = wait_for_pod(core, namespace, "asker", lambda seen: is_ready(seen) and seen, "the pod to be ready")

    def log() -> str:
        text = core.read_namespaced_pod_log("asker", namespace)
        return text if text.strip().endswith("403") else ""

    # The account may do nothing, and so 403: the API server knows it by its token.
    written = wait_until(log, "the answer of the API server")
    assert f"open sesame at {found.status.pod_ip}" in written


def test_an_evicted_pod_fails_with_the_reason(core: Any, plane: ControlPlane, namespace: str):
    core.create_namespaced_pod(namespace, pod("evicted", RAY_IMAGE, "exec sleep infinity"))
    wait_for_pod(core, namespace, "evicted", is_ready, "the pod to be ready")

    core.patch_namespaced_pod("evicted", namespace, {"metadata": {"annotations": {ORDER: "evict"}}})

    found = wait_for_pod(
        core, namespace, "evicted", lambda seen: seen.status.phase == "Failed" and seen, "the eviction"
    )
    assert found.status.reason == "Evicted"
    assert [each.status for each in found.status.conditions if each.type == "DisruptionTarget"] == ["True"]


def test_the_pods_of_a_lost_node_end_only_with_their_node(core: Any, plane: ControlPlane, namespace: str):
    plane.add_node("node-lost", labels={"lost": "yes"})
    core.create_namespaced_pod(namespace, pod("there", RAY_IMAGE, "exec sleep 86399", nodeSelector={"lost": "yes"}))
    wait_for_pod(core, namespace, "there", is_ready, "the pod to be ready")

    plane.remove_node("node-lost")

    # As in a real cluster: the pod is to end, but nobody is there who could end it.
    found = wait_for_pod(
        core, namespace, "there", lambda seen: seen.metadata.deletion_timestamp and seen, "the eviction"
    )
    assert [each.status for each in found.status.conditions if each.type == "DisruptionTarget"] == ["True"]
    assert not [process for process in psutil.process_iter(["cmdline"]) if "86399" in (process.info["cmdline"] or ())]
    core.delete_namespaced_pod("there", namespace, grace_period_seconds=0)
    core.delete_node("node-lost")


def test_a_real_ray_cluster_runs_a_job_and_changes_its_size(core: Any, custom: Any, cluster: Cluster, namespace: str):
    def change(*operations: dict[str, Any]) -> None:
        custom.patch_namespaced_custom_object(
            *GROUP, namespace, "rayclusters", "ray", list(operations), _content_type="application/json-patch+json"
        )

    def ready(kind: str, count: int) -> list[Any]:
        selector = f"{CLUSTER}=ray,ray.io/node-type={kind}"
        found = core.list_namespaced_pod(namespace, label_selector=selector).items
        return found if len(found) == count and all(is_ready(each) for each in found) else []

    def workers(count: int) -> list[Any]:
        return wait_until(lambda: ready("worker", count), f"{count} ready workers", seconds=600, every=0.5)

    custom.create_namespaced_custom_object(
        *GROUP, namespace, "rayclusters", ray_cluster("ray", cluster.image, workers=1)
    )
    [head] = wait_until(lambda: ready("head", 1), "the head to be ready", seconds=600, every=0.5)
    [first] = workers(1)
    ray = Ray(core, namespace, head.status.pod_ip)
    assert ray.alive() == sorted([head.status.pod_ip, first.status.pod_ip])
    assert ray.run_job(
        "import ray; ray.init(); print('sum', sum(ray.get([ray.remote(lambda x: -x).remote(-i) for i in range(5)])))"
    ).endswith("sum 10\n")

    replicas = "/spec/workerGroupSpecs/0/replicas"
    change({"op": "replace", "path": replicas, "value": 2})
    [second] = [each for each in workers(2) if each.metadata.uid != first.metadata.uid]
    named = {
        "op": "add",
        "path": "/spec/workerGroupSpecs/0/scaleStrategy",
        "value": {"workersToDelete": [first.metadata.name]},
    }
    change({"op": "replace", "path": replicas, "value": 1}, named)
    wait_until(
        lambda: [each.metadata.uid for each in ready("worker", 1)] == [second.metadata.uid],
        "the named pod to go",
        seconds=90,
    )

    core.delete_namespaced_pod(second.metadata.name, namespace)
    wait_until(
        lambda: [each for each in ready("worker", 1) if each.metadata.uid != second.metadata.uid],
        "another pod",
        seconds=300,
        every=0.5,
    )

    custom.delete_namespaced_custom_object(*GROUP, namespace, "rayclusters", "ray")
    wait_until(lambda: not core.list_namespaced_pod(namespace).items, "the pods to be gone", seconds=300)


class Ray:
    """The HTTP API of a head, with the token of its Secret."""

    def __init__(self, core: Any, namespace: str, address: str) -> None:
        token = base64.b64decode(core.read_namespaced_secret("ray", namespace).data["auth_token"]).decode()
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=f"http://{address}:8265", headers=headers, trust_env=False, timeout=60)

    def alive(self) -> list[str]:
        """The addresses of the nodes that are alive."""
        answer = self._client.get("/api/v0/nodes").raise_for_status().json()
        nodes = answer["data"]["result"]["result"]
        return sorted(node["node_ip"] for node in nodes if node["state"] == "ALIVE")

    def run_job(self, program: str) -> str:
        """Run a Python program as a job, and return its log."""
        body = {"entrypoint": f'python -c "{program}"'}
        job = self._client.post("/api/jobs/", json=body).raise_for_status().json()["submission_id"]

        def ended() -> dict[str, Any] | None:
            seen = self._client.get(f"/api/jobs/{job}").raise_for_status().json()
            return seen if seen["status"] in ("SUCCEEDED", "FAILED", "STOPPED") else None

        seen = wait_until(ended, "the end of the job", seconds=600, every=0.5)
        log = self._client.get(f"/api/jobs/{job}/logs").raise_for_status().json()["logs"]
        assert seen["status"] == "SUCCEEDED", f"{seen}\n{log}"
        return str(log)
