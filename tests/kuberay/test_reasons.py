"""Why a node is not ready or was lost, on a real control plane. Users read the reason as soon as Kubernetes knows it,
and again in the error of the call. The rollback leaves nothing.

Ray is the stand-in `light_ray.py`; the API server, its admission, the scheduler and the operator are real.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.errors import ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.reconciling import reconcile
from shoal.pool.timeouts import START_TIMEOUT
from shoal.state import Store
from shoal.state.schema import Operation
from tests.kuberay.agent.pod import ORDER
from tests.kuberay.control_plane import LIGHT_IMAGE
from tests.kuberay.pools import Kubernetes
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until

POD = "/spec/workerGroupSpecs/0/template/spec"
CONTAINER = f"{POD}/containers/0"
SPOT = "node-spot"
FAILS = ["/bin/sh", "-c", "ls /no; exit 4"]
OWN_COMMAND = "/spec/workerGroupSpecs/0/template/metadata"
"""With this annotation, the operator takes the container's command as it is."""


def add(path: str, value: Any) -> Callable[[Kubernetes], None]:
    """A change of the RayCluster, as of a user who makes a mistake."""
    return lambda kube: kube.change({"op": "add", "path": path, "value": value})


def command(script: str, memory: str = "64Mi") -> Callable[[Kubernetes], None]:
    """Let the workers run a command of their own."""

    def change(kube: Kubernetes) -> None:
        add(OWN_COMMAND, {"annotations": {"ray.io/overwrite-container-cmd": "true"}})(kube)
        add(f"{CONTAINER}/command", ["/bin/bash", "-c", script])(kube)
        add(f"{CONTAINER}/resources", {"requests": {"memory": memory}, "limits": {"memory": memory}})(kube)

    return change


def quota(kube: Kubernetes) -> None:
    hard = {"metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    kube.core.create_namespaced_resource_quota(kube.namespace, hard)


def strict_admission(kube: Kubernetes) -> None:
    """From now on, the API server refuses pods that may run as root."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.core.patch_namespace(kube.namespace, {"metadata": {"labels": labels}})


WAITING: dict[str, tuple[Callable[[Kubernetes], None], str]] = {
    "Unschedulable": (
        add(f"{CONTAINER}/resources", {"requests": {"cpu": "64"}}),
        r"is not scheduled: Unschedulable: 0/\d+ nodes are available: \d+ Insufficient cpu",
    ),
    "ImagePullBackOff": (
        add(f"{CONTAINER}/image", "shoal.test/nobody-has:1"),
        r"image shoal.test/nobody-has:1 cannot be pulled \((ErrImagePull|ImagePullBackOff): .*not found",
    ),
    "CrashLoop": (
        command("echo no license for this host; exit 3"),
        r"container ray-worker ends again and again \(exit code 3\); the end of its log: no license for this host",
    ),
    "OOMKilled": (
        command("exec tail /dev/zero"),
        r"container ray-worker ends again and again \(OOMKilled, exit code 137\)",
    ),
    "init container": (
        add(f"{POD}/initContainers", [{"name": "fetch", "image": LIGHT_IMAGE, "command": FAILS}]),
        r"container fetch ends again and again \(exit code 4\); the end of its log: .*/no",
    ),
    "missing Secret": (
        add(f"{CONTAINER}/envFrom", [{"secretRef": {"name": "no-such"}}]),
        r'container ray-worker does not start \(CreateContainerConfigError: secret "no-such" not found\)',
    ),
    "FailedMount": (
        add(f"{POD}/volumes", [{"name": "data", "secret": {"secretName": "no-such"}}]),
        r'does not start: FailedMount: MountVolume.SetUp failed for volume "data" : secret "no-such" not found',
    ),
    "missing claim": (
        add(f"{POD}/volumes", [{"name": "data", "persistentVolumeClaim": {"claimName": "no-such"}}]),
        r'is not scheduled: .*persistentvolumeclaim "no-such" not found',
    ),
    "quota": (quota, r"KubeRay cannot create the pod: .*exceeded quota: one"),
    "admission": (strict_admission, r'KubeRay cannot create the pod: .*violates PodSecurity "restricted:latest"'),
    "service account": (
        add(f"{POD}/serviceAccountName", "no-such"),
        r'KubeRay cannot create the pod: .*serviceaccount "no-such" not found',
    ),
    "invalid": (add("/spec/rayVersion", "2.50.0"), r"RayCluster .* is invalid: InvalidRayClusterSpec: "),
}


@pytest.mark.parametrize(("mistake", "said"), WAITING.values(), ids=WAITING.keys())
def test_the_reason_is_named_and_the_rollback_leaves_nothing(
    kube: Kubernetes, pool: ComputePool, mistake: Callable[[Kubernetes], None], said: str
):
    mistake(kube)
    pool.scale(2, is_async=True)
    operation = str(pool.operation_id)

    def described() -> bool:
        reconcile(Store(), pool.name)
        return bool(re.search(said, pool.describe().reason or ""))

    wait_until(described, f"the reason {said!r}", seconds=60, every=0.2)
    with Store().transaction() as session:  # its deadline is now
        session.get_one(Operation, operation).deadline = time.time()
    with pytest.raises(ScaleError) as caught:
        pool.wait_for_operation(operation)
    assert re.search(said, str(caught.value))

    def rolled_back() -> bool:
        reconcile(Store(), pool.name)
        return len(node_rows()) == 1 and kube.pods() == [] and kube.replicas() == 0

    wait_until(rolled_back, "one node, and no pod of a worker", seconds=60, every=0.2)
    status = pool.describe()
    assert (len(pool.get_nodes()), status.target) == (1, 1)
    assert re.search(f"the last operation was rolled back: .*{said}", status.reason or "")


def annotated(order: str) -> Callable[[Kubernetes, str], None]:
    """An order to the node that runs the pod."""

    def fault(kube: Kubernetes, pod: str) -> None:
        kube.core.patch_namespaced_pod(pod, kube.namespace, {"metadata": {"annotations": {ORDER: order}}})

    return fault


def deleted(kube: Kubernetes, pod: str) -> None:
    kube.core.delete_namespaced_pod(pod, kube.namespace, grace_period_seconds=0)


def machine_gone(kube: Kubernetes, pod: str) -> None:
    """As a spot machine that is taken away: nobody tells Kubernetes."""
    kube.plane.remove_node(SPOT)
    kube.change({"op": "remove", "path": f"{POD}/nodeSelector"})


LOST: dict[str, tuple[Callable[[Kubernetes, str], None], str]] = {
    "evicted": (annotated("evict"), r"(has ended|is gone): Evicted: The node was low on resource: memory"),
    "OOMKilled": (annotated("oom"), r"Ray has ended in pod .* \(OOMKilled, exit code 137\)"),
    "deleted": (deleted, r"is gone: it was deleted, or its machine has left Kubernetes"),
    "machine gone": (machine_gone, r"Ray has ended in pod|ends: DeletionByTaintManager"),
}


@pytest.fixture
def spot(kube: Kubernetes) -> Iterator[None]:
    """A machine of its own for workers."""
    kube.plane.add_node(SPOT, labels={"spot": "yes"})
    kube.change({"op": "add", "path": f"{POD}/nodeSelector", "value": {"spot": "yes"}})
    yield
    kube.plane.remove_node(SPOT)
    # As an administrator does: nobody else confirms the end of its pods.
    for pod in kube.core.list_namespaced_pod(kube.namespace, field_selector=f"spec.nodeName={SPOT}").items:
        kube.core.delete_namespaced_pod(pod.metadata.name, kube.namespace, grace_period_seconds=0)
    kube.core.delete_node(SPOT)


@pytest.mark.parametrize(("fault", "said"), LOST.values(), ids=LOST.keys())
def test_why_a_node_was_lost_is_named_and_it_is_replaced(
    kube: Kubernetes,
    pool: ComputePool,
    request: pytest.FixtureRequest,
    fault: Callable[[Kubernetes, str], None],
    said: str,
):
    if fault is machine_gone:
        request.getfixturevalue("spot")
    pool.scale(2)
    [pod] = kube.pods()
    fault(kube, pod)

    def named() -> bool:
        return any(re.search(said, node.error or "") for node in pool.describe().failed)

    wait_until(named, f"the reason {said!r}", seconds=60, every=0.1)

    def replaced() -> bool:
        # Nodes that are lost soon after their start are replaced after a pause.
        reconcile(Store(), pool.name, clock=lambda: time.time() + START_TIMEOUT)
        return len(pool.get_nodes()) == 2

    wait_until(replaced, "another node", seconds=120, every=0.2)
