"""Reasons why a node on Kubernetes is not ready or was lost, as users can act on them: pure, without requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.pool.backends.kuberay.resources import Container, Pod, RayCluster, WorkerGroup
from shoal.pool.spec import PoolSpec

_OPERATOR_PATIENCE = 10.0
"""Seconds within which the operator has to see a change of the RayCluster. It normally takes less than one second."""

_IDLE = (
    "which ends idle nodes of the pool as well: set enableInTreeAutoscaling to false, or raise its idleTimeoutSeconds"
)

_STARTING = ("ContainerCreating", "PodInitializing")
_PULL = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")

LogEnd = Callable[[str, str], str]
"""Function that returns the end of the log of a pod's container."""


def cluster_problem(spec: PoolSpec, cluster: RayCluster, warnings: Mapping[str, str], now: float) -> str:
    """Return why a RayCluster has no pod for a node yet."""
    place = f"RayCluster {spec.namespace}/{cluster.name}"
    if cluster.is_deleted:
        return f"{place} is being deleted"
    if cluster.is_suspended:
        return f"{place} is suspended: set spec.suspend to false"
    warning = warnings.get(cluster.uid, "")
    if is_invalid(cluster, warnings):
        return f"{place} is invalid: {warning}"
    if cluster.problem:
        return f"KubeRay cannot create the pod: {cluster.problem}"
    if is_ignored(cluster, now):
        manager = cluster.manager or "KubeRay's operator"
        return f"{manager} does not act on {place}: check that the operator runs and watches namespace {spec.namespace}"
    if warning.startswith("Failed"):
        return f"KubeRay cannot create the pod: {warning}"
    return "KubeRay has not created the pod yet"


def is_invalid(cluster: RayCluster, warnings: Mapping[str, str]) -> bool:
    """Return whether the operator has refused the RayCluster."""
    return warnings.get(cluster.uid, "").startswith("InvalidRayCluster")


def is_ignored(cluster: RayCluster, now: float) -> bool:
    """Return whether the operator should have seen the last change of the RayCluster, and has not."""
    sent = cluster.claim.at if cluster.claim else 0.0
    return cluster.observed < cluster.generation and now - sent > _OPERATOR_PATIENCE


def group_problem(group: WorkerGroup, rows: int) -> str | None:
    """Return why a worker group cannot have as many pods as a pool has rows of workers; None if it can."""
    if group.is_suspended:
        return f"worker group {group.name} is suspended: set its field suspend to false"
    if rows > group.max_replicas:
        return f"worker group {group.name} has maxReplicas={group.max_replicas}: raise it, or request fewer nodes"
    return None


def unsent_size(spec: PoolSpec, cluster: RayCluster, group: WorkerGroup) -> str:
    """Return why a worker group has fewer replicas than its pool needs, although the API accepts the change."""
    if not cluster.changed_by or cluster.is_autoscaled:
        return f"the size of worker group {group.name} has not been sent to Kubernetes yet"
    return (
        f"worker group {group.name} of RayCluster {spec.namespace}/{cluster.name} was set back to {group.replicas} "
        f"replicas by {cluster.changed_by}: if GitOps manages the RayCluster, let it ignore the fields replicas, "
        "minReplicas and scaleStrategy"
    )


def why_waiting(pod: Pod, warnings: Mapping[str, str], log_end: LogEnd, silence: str | None) -> str:
    """Return why the Ray node of a pod has not joined the cluster yet.

    Args:
        pod: The pod.
        warnings: The newest warning about each object, by its uid.
        log_end: Reads the end of a container's log.
        silence: Why Ray's head does not answer; None if it answers.
    """
    if pod.is_deleted:
        return f"{pod.ending}; Kubernetes has not confirmed its end"
    if not pod.is_alive:
        return f"pod {pod.name} has ended: {pod.message or pod.phase}"
    if pod.unscheduled:
        gated = ". A controller such as Kueue has not admitted it: its queue may have no quota left"
        return f"pod {pod.name} is not scheduled: {pod.unscheduled}" + gated * ("SchedulingGated" in pod.unscheduled)
    for container in pod.containers:
        if problem := _container_problem(container, lambda name: log_end(pod.name, name)):
            return f"pod {pod.name}: {problem}"
    warning = warnings.get(pod.uid, "")
    if pod.phase == "Pending" and warning and not warning.startswith("FailedScheduling"):
        return f"pod {pod.name} does not start: {warning}"
    if pod.phase == "Pending":
        return f"pod {pod.name} starts"
    if pod.is_head and silence:
        return f"pod {pod.name} runs, and {silence}"
    return f"pod {pod.name} runs, and its Ray node has not joined the cluster yet"


def why_lost(endpoint: Mapping[str, str], pod: Pod | None, warnings: Mapping[str, str], cluster: RayCluster) -> str:
    """Return why a node was lost.

    Args:
        endpoint: Data of the node, with the name and uid of the pod that it had.
        pod: The pod; None if it is gone.
        warnings: The newest warning about each object, by its uid. KubeRay deletes a pod as soon as it is evicted.
        cluster: The RayCluster.
    """
    name = endpoint["pod"]
    if cluster.changed_by and any(name in group.named for group in cluster.groups):
        author = f"Ray's autoscaler, {_IDLE}" if cluster.is_autoscaled else f"{cluster.changed_by} (workersToDelete)"
        return f"pod {name} was ended by {author}"
    idle = f", or Ray's autoscaler has ended it, {_IDLE}" if cluster.is_autoscaled else ""
    if pod is None and (warning := warnings.get(endpoint["pod_uid"], "")).startswith("Evicted"):
        return f"pod {name} is gone: {warning}"
    if pod is None:
        return f"pod {name} is gone: it was deleted, or its machine has left Kubernetes{idle}"
    if pod.disruption:
        return f"pod {name} ends: {pod.disruption}"
    if pod.message or not pod.is_alive:
        return f"pod {name} has ended: {pod.message or ('it is being deleted' if pod.is_deleted else pod.phase)}{idle}"
    ended = next((container.ended for container in pod.containers if container.ended and not container.is_init), "")
    return f"Ray has ended in pod {name}" + (f" ({ended})" if ended else idle)


def _container_problem(container: Container, log_end: Callable[[str], str]) -> str | None:
    if container.waiting in _PULL:
        return (
            f"image {container.image} cannot be pulled ({container.waiting}: {container.message}): check the image's "
            "name and the pull secret"
        )
    if container.waiting == "CrashLoopBackOff" or (container.has_ended and not container.waiting):
        log = log_end(container.name)
        return f"container {container.name} ends again and again ({container.ended or container.message})" + (
            f"; the end of its log: {log}" if log else ""
        )
    if container.waiting and container.waiting not in _STARTING:
        return f"container {container.name} does not start ({container.waiting}: {container.message})"
    return None
