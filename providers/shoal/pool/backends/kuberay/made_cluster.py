"""RayClusters that shoal creates when a pool comes up, and deletes when it goes down.

A Kubernetes Lease owns each of them. Processes that reconcile the pool renew the Lease. If all of them are gone for
good, `reaper` deletes the Lease, and Kubernetes then deletes the RayCluster and all that the operator has created for
it.
"""

from __future__ import annotations

import logging
import time

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends.base import NodeRef, PoolRef
from shoal.pool.backends.kuberay import manifest
from shoal.pool.backends.kuberay.client import ConflictError, KubeClient
from shoal.pool.backends.kuberay.resources import RayCluster
from shoal.pool.backends.kuberay.scaling import is_outdated
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import RAY_CLUSTER_RENEWAL

log = logging.getLogger(__name__)

_FRESH = 60.0
"""Seconds after which a decision creates no RayCluster any more. The pool of a process that was paused for longer may
be down, and nothing in Kubernetes tells it so: its RayCluster is gone."""

_renewed: dict[tuple[str, str], float] = {}
"""When this process has last renewed the Lease of a RayCluster, in its monotonic seconds."""


def check(client: KubeClient, spec: PoolSpec, cluster: RayCluster | None, size: int) -> None:
    """Check that the RayCluster of a pool can be created, or was created by shoal. Nothing is changed.

    Raises:
        InvalidArgumentError: Kubernetes refuses the RayCluster, others could read its token, or somebody else has
            created a RayCluster of this name.
        PoolUnreachableError: shoal may not create or delete it.
    """
    if cluster is None:
        body = manifest.ray_cluster(PoolRef(spec, size, time.time()), None)
        if manifest.as_created(body).has_token:
            spec.check_token_is_private()
        client.try_creation(body)
    elif not cluster.is_made:
        raise InvalidArgumentError(
            f"RayCluster {spec.namespace}/{cluster.name} exists already, and shoal has not created it: give the pool "
            f"another name, or leave out {'image' if spec.image else 'template'} to use this RayCluster"
        )


def create(client: KubeClient, pool: PoolRef) -> None:
    """Create the RayCluster of a pool that comes up, with its Lease. Another process may have been faster."""
    if time.time() - pool.stamp > _FRESH:
        log.info("pool %s: the decision to create its RayCluster is too old; the next round decides again", pool.id)
        return
    owner = client.hold_lease()
    try:
        client.create_ray_cluster(manifest.ray_cluster(pool, owner))
    except ConflictError as error:
        log.info("%s", error)


def delete(client: KubeClient, pool: PoolRef, nodes: list[NodeRef]) -> dict[str, str | None]:
    """Delete the RayCluster of a pool that goes down, then its Lease, and return what is left of each node."""
    cluster = client.ray_cluster()
    if cluster is not None and cluster.is_made and not is_outdated(cluster, pool):
        if not cluster.is_deleted:
            client.delete_ray_cluster(cluster)
            cluster = client.ray_cluster()
        pods = {pod.uid: pod for pod in client.pods()}
    else:
        # A RayCluster that others have made, or a newer start of the pool, has pods that are not of these nodes.
        pods = {} if cluster is not None else {pod.uid: pod for pod in client.pods()}
        cluster = None
    left = {}
    for node in nodes:
        uid = (node.endpoint or {}).get("pod_uid")
        # A row without a pod may have one that was created meanwhile.
        pod = pods.get(uid) if uid else next(iter(pods.values()), None)
        left[node.id] = f"pod {pod.name} is being deleted" if pod else None
    if cluster is not None:
        place = f"RayCluster {pool.spec.namespace}/{cluster.name} is being deleted"
        return {node: problem or place for node, problem in left.items()}
    if not any(left.values()):
        client.release_lease()
    return left


def renew(spec: PoolSpec) -> None:
    """Renew the Lease of a pool's RayCluster, unless this process has done so a short time ago."""
    key = (str(spec.namespace), spec.ray_cluster)
    if time.monotonic() - _renewed.get(key, float("-inf")) < RAY_CLUSTER_RENEWAL:
        return
    try:
        KubeClient(spec).renew_lease()
        _renewed[key] = time.monotonic()
    except (PoolUnreachableError, InvalidArgumentError) as error:
        log.warning("pool %s: the Lease of its RayCluster could not be renewed: %s", spec.name, error)
