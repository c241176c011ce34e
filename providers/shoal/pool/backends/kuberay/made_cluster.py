"""RayClusters that shoal creates when a pool comes up, and deletes when it goes down.

A Kubernetes Lease owns each of them. Processes that reconcile the pool renew the Lease. If all of them are gone for
good, `reaper` deletes the Lease, and Kubernetes then deletes the RayCluster and all that the operator has created for
it.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends.base import PoolRef
from shoal.pool.backends.kuberay import manifest
from shoal.pool.backends.kuberay.client import ConflictError, KubeClient
from shoal.pool.backends.kuberay.resources import ELASTIC, RayCluster
from shoal.pool.backends.kuberay.scaling import is_own, used_by_another
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import RAY_CLUSTER_RENEWAL

log = logging.getLogger(__name__)

_FRESH = 60.0
"""Seconds after which a decision creates no RayCluster any more. The pool of a process that was paused for longer may
be down, and nothing in Kubernetes tells it so: its RayCluster is gone."""

_renewed: dict[str, float] = {}
"""When this process has last renewed a Lease, by the life of the pool (`PoolRef.life`), in its monotonic seconds."""


def check(client: KubeClient, spec: PoolSpec, cluster: RayCluster | None, size: int) -> None:
    """Check that the RayCluster of a pool can be created, or was created by shoal. Nothing is changed.

    Raises:
        InvalidArgumentError: Kubernetes refuses the RayCluster, others could read its token, somebody else has created
            a RayCluster of this name, or Kueue would end its nodes at each change of the size.
        PoolUnreachableError: shoal may not create or delete it.
    """
    if cluster is None:
        body = manifest.ray_cluster(PoolRef(spec, size, time.time()), None)
        made = manifest.as_created(body)
        if made.has_token:
            spec.check_token_is_private()
        if made.is_rigid and spec.min_nodes != spec.max_nodes:
            raise InvalidArgumentError(
                f'pool "{spec.name}" has queue={spec.queue} and between {spec.min_nodes} and {spec.max_nodes} nodes, '
                "but Kueue ends all nodes of a RayCluster whose size changes: give min_nodes and max_nodes the same "
                f'value, or use Kueue\'s elastic jobs and a template= with the annotation {ELASTIC}: "true"'
            )
        with suppress(ConflictError):  # Another process has just created it.
            client.try_creation(body)
    elif not cluster.is_made:
        raise InvalidArgumentError(
            f"RayCluster {spec.namespace}/{cluster.name} exists already, and shoal has not created it: give the pool "
            f"another name, or leave out {'image' if spec.image else 'template'} to use this RayCluster"
        )


def create(client: KubeClient, pool: PoolRef) -> bool:
    """Create the RayCluster of a pool that comes up, with its Lease, unless it exists. Return whether it can be scaled.

    A RayCluster of an earlier life of the pool, which was abandoned, is deleted first.

    Raises:
        InvalidArgumentError: Another pool has created the RayCluster.
    """
    cluster = client.ray_cluster()
    if cluster is not None and is_own(cluster, pool):
        return not cluster.is_deleted
    if cluster is not None and not (cluster.claim and cluster.claim.id == pool.id):
        raise InvalidArgumentError(used_by_another(cluster, pool))
    if time.time() - pool.stamp > _FRESH:
        log.info("pool %s: the decision to create its RayCluster is too old; the next round decides again", pool.id)
    elif cluster is not None:
        if not cluster.is_deleted:
            client.delete_ray_cluster(cluster)
    elif any(pod.is_alive for pod in client.pods()):
        log.info("pool %s: pods of an earlier RayCluster still end; the next round tries again", pool.id)
    else:
        with suppress(ConflictError):  # Another process was faster.
            client.create_ray_cluster(manifest.ray_cluster(pool, client.hold_lease(pool.life)))
    return False


def delete(client: KubeClient, pool: PoolRef) -> str | None:
    """Delete the RayCluster of a pool that goes down, and its Lease. Return what is left of both and of the pods, or
    None. A RayCluster that another pool or a later start of this pool has created is left as it is, with its pods."""
    cluster = client.ray_cluster()
    if cluster is not None and is_own(cluster, pool):
        if not cluster.is_deleted:
            client.delete_ray_cluster(cluster)
        return f"RayCluster {pool.spec.namespace}/{cluster.name} is being deleted"
    if cluster is None and (pods := client.pods()):
        return pods[0].ending
    client.release_lease(pool.life)
    return None


def renew(pool: PoolRef) -> None:
    """Renew the Lease of a pool's RayCluster, unless this process has done so a short time ago."""
    if time.monotonic() - _renewed.get(pool.life, float("-inf")) < RAY_CLUSTER_RENEWAL:
        return
    try:
        KubeClient(pool.spec).renew_lease(pool.life)
        _renewed[pool.life] = time.monotonic()
    except (PoolUnreachableError, InvalidArgumentError) as error:
        log.warning("pool %s: the Lease of its RayCluster could not be renewed: %s", pool.spec.name, error)
