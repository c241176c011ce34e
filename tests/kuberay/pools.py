"""Pools on a real control plane: on a RayCluster that exists, and on one that shoal creates.

Ray is the stand-in `light_ray.py`, whose nodes start fast; the operator, the scheduler and all requests are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.pool.api import ComputePool, list_pools
from shoal.state.schema import Node
from tests.kuberay.accounts import make_account, smallest_role
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane
from tests.kuberay.manifests import ray_cluster

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

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


@dataclass
class Made(Kubernetes):
    """A pool whose RayCluster shoal creates, with the rights of an account that may create them."""

    @property
    def uri(self) -> str:
        return (
            f"kuberay://{self.namespace}/{self.name}?max_nodes=4&kubeconfig={self.kubeconfig}&image={LIGHT_IMAGE}"
            "&memory_per_node=512Mi"
        )

    def trace(self, node: Node) -> object:
        return node.endpoint["pod"] in self.pods(heads=True)

    def everything(self) -> set[str]:
        """All objects of the namespace, of every type that can be listed, except events."""
        from kubernetes.dynamic import DynamicClient, Resource

        # By default, the client keeps the types by the API's address, which an earlier control plane may have had.
        types = str(self.kubeconfig.with_suffix(".types"))
        found = DynamicClient(self.core.api_client, cache_file=types).resources.search(namespaced=True)
        return {
            f"{kind.name}/{made.metadata.name}"
            for kind in found
            if type(kind) is Resource and "list" in kind.verbs and kind.name != "events"
            for made in kind.get(namespace=self.namespace).items
        }


@contextmanager
def existing(plane: ControlPlane, client: ApiClient, namespace: str, folder: Path) -> Iterator[Kubernetes]:
    """A RayCluster without workers, and an account that may only use it."""
    from kubernetes.client import CoreV1Api, CustomObjectsApi

    kubeconfig = make_account(client, namespace, smallest_role(namespace, "conform"), folder)
    kube = Kubernetes(plane, namespace, kubeconfig, CoreV1Api(client), CustomObjectsApi(client))
    body = ray_cluster(kube.name, LIGHT_IMAGE, workers=0)
    body["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = "1"  # as the nodes of the other backends
    kube.custom.create_namespaced_custom_object(*RAY, namespace, "rayclusters", body)
    yield kube
    _end_pools(plane)


@contextmanager
def created(plane: ControlPlane, client: ApiClient, namespace: str, folder: Path) -> Iterator[Made]:
    """No RayCluster, and an account that may create one."""
    from kubernetes.client import CoreV1Api, CustomObjectsApi

    kubeconfig = make_account(client, namespace, smallest_role(namespace, "conform", creates=True), folder)
    yield Made(plane, namespace, kubeconfig, CoreV1Api(client), CustomObjectsApi(client))
    _end_pools(plane)


def _end_pools(plane: ControlPlane) -> None:
    plane.add_light_image()
    for status in list_pools():
        ComputePool(status.name).down()
