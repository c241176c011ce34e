"""Pools on a real control plane: the guarantees of every backend, with the smallest Role, and what users read.

Ray is the stand-in `light_ray.py`, whose nodes start fast; the operator, the scheduler and all requests are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ScaleError
from shoal.pool.api import ComputePool, list_pools
from shoal.pool.reconcile.rounds import reconcile
from shoal.state import Store
from shoal.state.schema import Node
from tests.kuberay.accounts import make_account, smallest_role
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane
from tests.kuberay.manifests import ray_cluster
from tests.pool.backends.test_conformance import GUARANTEES
from tests.support.waiting import wait_until

client = pytest.importorskip("kubernetes.client")

RAY = ("ray.io", "v1")


@dataclass
class Kubernetes:
    """A RayCluster without workers on the control plane, and the kubeconfig of an account with the smallest Role."""

    plane: ControlPlane
    namespace: str
    kubeconfig: Path
    core: Any
    custom: Any
    name: str = "conform"

    @property
    def uri(self) -> str:
        """The pool on the RayCluster."""
        return f"kuberay://{self.namespace}/{self.name}?max_nodes=4&kubeconfig={self.kubeconfig}"

    def pods(self, *, heads: bool = False) -> list[str]:
        """The names of the pods, also of those that end."""
        kind = "" if heads else ",ray.io/node-type=worker"
        found = self.core.list_namespaced_pod(self.namespace, label_selector=f"ray.io/cluster={self.name}{kind}")
        return [pod.metadata.name for pod in found.items]

    def change(self, *operations: dict[str, Any]) -> None:
        """Change the RayCluster, as another user does."""
        self.custom.patch_namespaced_custom_object(
            *RAY,
            self.namespace,
            "rayclusters",
            self.name,
            list(operations),
            _content_type="application/json-patch+json",
        )

    def replicas(self) -> int:
        """The replicas of the group of workers."""
        found = self.custom.get_namespaced_custom_object(*RAY, self.namespace, "rayclusters", self.name)
        return int(found["spec"]["workerGroupSpecs"][0]["replicas"])

    def lose(self, node: Node) -> None:
        """Delete the pod of a node, and let no other one start for it."""
        self.plane.remove_image(LIGHT_IMAGE)
        self.core.delete_namespaced_pod(node.endpoint["pod"], self.namespace, grace_period_seconds=0)

    def mend(self) -> None:
        """Let pods start again."""
        self.plane.add_light_image()

    def trace(self, node: Node) -> object:
        """What is left of a node that has ended."""
        left = node.endpoint["pod"] in self.pods()
        return left or (None if self.pods(heads=True) else "the head was ended, and is not ours to end")

    def leave_behind(self, node_id: str) -> bool:
        """Pods belong to their RayCluster: none is without a row."""
        return False


@pytest.fixture
def kube(
    plane: ControlPlane,
    cluster: Cluster,
    namespace: str,
    fresh_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Kubernetes]:
    """No detached reconciler: whoever acts or sweeps does it all."""
    monkeypatch.setattr("shoal.pool.reconcile.background_process.ensure_running", lambda: None)
    with cluster.client() as api:
        kubeconfig = make_account(api, namespace, smallest_role(namespace, "conform"), tmp_path)
        made = Kubernetes(plane, namespace, kubeconfig, client.CoreV1Api(api), client.CustomObjectsApi(api))
        body = ray_cluster(made.name, LIGHT_IMAGE, workers=0)
        body["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = "1"  # as the nodes of the other backends
        made.custom.create_namespaced_custom_object(*RAY, namespace, "rayclusters", body)
        yield made
        plane.add_light_image()
        for status in list_pools():
            ComputePool(status.name).down()


@pytest.fixture
def pool(kube: Kubernetes) -> ComputePool:
    return ComputePool(kube.uri).up()


def reason(pool: ComputePool) -> str:
    """Why the first node that is not ready waits, as users read it after one look."""
    reconcile(Store(), pool.name)
    return pool.describe().reason or ""


def wait_for_reason(pool: ComputePool, said: str) -> str:
    return wait_until(lambda: said in (found := reason(pool)) and found, f"the reason {said!r}", seconds=60, every=0.2)


def wait_for_nodes(pool: ComputePool, number: int) -> None:
    def there() -> bool:
        reconcile(Store(), pool.name)
        return len(pool.get_nodes()) == number

    wait_until(there, f"{number} nodes", seconds=120, every=0.2)


def test_a_real_cluster_keeps_every_guarantee_with_the_smallest_role(kube: Kubernetes):
    pool = ComputePool(kube.uri).up()
    for test in GUARANTEES:
        pool.scale(1)
        test(kube, pool)


def test_the_role_gives_no_other_right(kube: Kubernetes):
    from kubernetes.config import new_client_from_config

    with new_client_from_config(str(kube.kubeconfig)) as api:
        asked = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": kube.namespace},
        }
        rules = client.AuthorizationV1Api(api).create_self_subject_rules_review(asked).status.resource_rules

    def of(groups: list[str], resources: list[str], verbs: list[str]) -> set[tuple[str, str, str]]:
        return {(group, resource, verb) for group in groups for resource in resources for verb in verbs}

    given = set().union(*(of(rule.api_groups, rule.resources, rule.verbs) for rule in rules))
    # Every account may ask what it may do.
    own = {right for right in given if right[0].endswith(".k8s.io")}
    asked_for = smallest_role(kube.namespace, kube.name)["rules"]
    assert given - own == set().union(*(of(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in asked_for))


def test_a_quota_is_named(kube: Kubernetes, pool: ComputePool):
    kube.core.create_namespaced_resource_quota(
        kube.namespace, {"metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    )
    pool.scale(2, is_async=True)
    assert "exceeded quota" in wait_for_reason(pool, "KubeRay cannot create the pod")


def test_twenty_scalers_at_once_end_at_one_size(kube: Kubernetes, pool: ComputePool):
    def scale(number: int) -> bool:
        try:
            return ComputePool(kube.uri).scale(1 + number % 4)
        except ScaleError:  # a newer operation has set another size
            return False

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(scale, range(20)))
    size = pool.describe().target
    reconcile(Store(), pool.name)
    wait_until(lambda: len(kube.pods()) == size - 1, f"{size - 1} workers", seconds=60)
    assert kube.replicas() == size - 1


def test_an_operator_that_does_not_run_is_named_and_its_restart_is_enough(kube: Kubernetes, pool: ComputePool):
    kube.plane.services["ray-operator"].stop()
    try:
        pool.scale(2, is_async=True)
        wait_for_reason(pool, "does not act on RayCluster")
    finally:
        kube.plane.services["ray-operator"].start()
    wait_for_nodes(pool, 2)
