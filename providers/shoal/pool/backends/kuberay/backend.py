"""Backend for Ray clusters on Kubernetes. KubeRay's operator starts and ends the pods; shoal changes the number of
replicas of one worker group, and names the pods that have to go. It uses a RayCluster that exists, or creates one.

A row of a `kuberay://` pool is assigned to a pod as soon as the pod exists, and is ready when the pod's Ray node has
joined the cluster. So demand, leases and rollback work as in other pools.

A Kubernetes Lease owns each RayCluster that shoal creates. Processes that reconcile the pool renew the Lease. If all of
them are gone for good, `reaper` deletes the Lease, and Kubernetes then deletes the RayCluster and all that the operator
has created for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends import versions
from shoal.pool.backends.interface import Arrival, ClusterBackend, NodeRef, PoolRef, Seen, Waiting
from shoal.pool.backends.kuberay import head_access, reasons, resources, scaling, watch
from shoal.pool.backends.kuberay.client import ConflictError, KubeClient
from shoal.pool.backends.kuberay.resources import ELASTIC, Pod, RayCluster
from shoal.pool.backends.kuberay.scaling import Matched, is_own, match, used_by_another
from shoal.pool.backends.ray_http import GCS_PORT, ClusterNode, RayHead, ScriptRunner, alive_nodes, python_version
from shoal.pool.endpoint import Endpoint, ca_path, keep_token, kept_token, remove_token
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import RAY_CLUSTER_RENEWAL
from shoal.state.home import home

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
        body = resources.ray_cluster(PoolRef(spec, size, time.time()), None)
        made = resources.as_created(body)
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
            client.create_ray_cluster(resources.ray_cluster(pool, client.hold_lease(pool.life)))
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


log = logging.getLogger(__name__)

_MOST_CONFLICTS = 10
"""Number of times that a patch is tried although the RayCluster has changed meanwhile. The operator writes its status a
few times after each change."""


class KubeRayBackend(ClusterBackend):
    """Backend for RayClusters, with or without Ray's autoscaler."""

    def admit(self, spec: PoolSpec, size: int) -> None:
        """Raise an error if there is no such RayCluster, if shoal lacks a right or cannot scale it, if others could
        read its token, if the size is above the limit of its worker group, or if a head that runs does not answer."""
        client = KubeClient(spec)
        cluster = client.ray_cluster()
        if cluster is not None and cluster.has_token:
            spec.check_token_is_private()
        if spec.makes_cluster:
            check(client, spec, cluster, size)
            if cluster is None or cluster.is_deleted:  # `start` waits for its end.
                return
        if cluster is None:
            raise InvalidArgumentError(
                f"{_missing(spec)}: create it, give image= so that shoal creates it, or correct the URI of pool "
                f'"{spec.name}"'
            )
        group = cluster.group(spec)
        problem = reasons.group_problem(group, size - 1)
        if cluster.is_rigid and size - 1 > group.replicas:
            problem = scaling.rigid(spec.namespace, cluster)
        if cluster.is_suspended or cluster.is_deleted:
            problem = reasons.cluster_problem(spec, cluster, {}, time.time())
        if problem:
            raise InvalidArgumentError(f'pool "{spec.name}" cannot have {size} nodes: {problem}')
        client.check_rights(cluster)
        client.patch([{"op": "test", "path": "/metadata/name", "value": cluster.name}], dry_run="All")
        pods = [] if cluster.claim and cluster.claim.is_held else client.pods()
        is_ready = any(pod.is_head and pod.is_ready for pod in pods)
        if is_ready and (silence := self._ray_nodes(client, spec, cluster, pods)[2]):
            self.discard(spec.name, everything=False)
            raise PoolUnreachableError(silence)

    def discard(self, name: str, *, everything: bool) -> None:
        """Remove the file with Ray's token. The next process that needs the token reads it from the Secret again."""
        remove_token(name)

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        """Report the nodes whose pod or Ray node is gone, assign pods to the rows that wait, and say why these wait.

        A look reads the RayCluster, its pods and Ray's nodes. Each process that reconciles a pool or waits for it looks
        at it every second, in each home. So a look that has found nothing to report counts for a while (see `watch`).
        """
        return watch.view(spec).look(nodes, partial(self._look, spec, nodes)) if nodes else Seen()

    def _look(self, spec: PoolSpec, nodes: Sequence[NodeRef], objects: Callable[[KubeClient], watch.Objects]) -> Seen:
        try:
            client = KubeClient(spec)
            cluster, pods = objects(client)
            if cluster is None:
                return _without_cluster(client, spec, nodes)
            group = cluster.group(spec)
            head, ray, silence = self._ray_nodes(client, spec, cluster, pods)
        except (PoolUnreachableError, InvalidArgumentError) as error:
            return Seen(silence=str(error))
        found = match(nodes, pods, ray, group.name)
        is_head_held = any(
            node.is_head and "ray_node_id" in (node.endpoint or {}) and node.id not in found.lost for node in nodes
        )
        lost = {node.id: node.endpoint for node in nodes if node.endpoint and node.id in found.lost}
        warnings = client.warnings([lost[row]["pod_uid"] for row, pod in found.lost.items() if pod is None])
        return Seen(
            lost={row: reasons.why_lost(lost[row], pod, warnings, cluster) for row, pod in found.lost.items()},
            arrived={
                row: _arrival(spec, cluster, pod, node, python_version(head) if head and node.is_head else None)
                for row, (pod, node) in found.joined.items()
            },
            waiting=_waiting(client, spec, cluster, found, silence, sum(not node.is_head for node in nodes)),
            silence=silence if is_head_held else None,
        )

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        """Raise the replicas of the worker group to the size of the pool, or create the RayCluster with this size."""
        try:
            client = KubeClient(pool.spec)
            if not pool.spec.makes_cluster or create(client, pool):
                _send(client, pool, lambda cluster, pods: scaling.plan_start(cluster, pods, pool))
        except PoolUnreachableError as error:
            log.warning("%s", error)  # The error is only logged, because the next try requests the nodes again.

    def renew(self, pool: PoolRef) -> None:
        """Renew the Lease of a RayCluster that shoal has created, unless this process has done so a short time ago."""
        is_due = time.monotonic() - _renewed.get(pool.life, float("-inf")) >= RAY_CLUSTER_RENEWAL
        if not pool.spec.makes_cluster or not is_due:
            return
        try:
            KubeClient(pool.spec).renew_lease(pool.life)
            _renewed[pool.life] = time.monotonic()
        except (PoolUnreachableError, InvalidArgumentError) as error:
            log.warning("pool %s: the Lease of its RayCluster could not be renewed: %s", pool.spec.name, error)

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Lower the replicas of the worker group to the size of the pool, name the pods that have to go, and check that
        they are gone. When the pool goes down, the RayCluster gets the replicas that it had when the pool came up, or
        is deleted if shoal has created it."""
        try:
            client = KubeClient(pool.spec)
            if pool.spec.makes_cluster and pool.size == 0:
                return _of_all(pool, nodes, delete(client, pool))
            sent = _send(client, pool, lambda cluster, pods: scaling.plan_end(cluster, pods, pool, nodes))
        except (PoolUnreachableError, InvalidArgumentError, ConflictError) as error:
            hint = f"to stop trying, run `shoal pool down {pool.spec.name} --abandon`"
            return _of_all(pool, nodes, f"pods may be left: {error}; {hint}")
        if sent is None or sent.plan.problem:
            return _of_all(pool, nodes, sent.plan.problem if sent else None)
        return sent.left(pool, nodes, client)

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """Build the head's addresses from the data in the head's row, and the way of this process to the head."""
        path = None
        if head.get("token_secret"):
            path = home() / keep_token(spec.name, KubeClient(spec).token(head["token_secret"]))
        way = head_access.access(spec, head["service"])
        known = versions.recorded(head)
        return Endpoint(head["api"], head["gcs"], path, known, ca_path(spec), way, is_direct=False)

    def log(self, node: NodeRef) -> str:
        """Return the command that shows the log of the node's pod."""
        endpoint = node.endpoint or {}
        return f"kubectl logs -n {endpoint['namespace']} {endpoint['pod']}" if "pod" in endpoint else ""

    def script_runner(self, spec: PoolSpec) -> ScriptRunner:
        """Return the runner of scripts on the RayCluster of a pool.

        Raises:
            PoolUnreachableError: The RayCluster does not exist, or the Kubernetes API does not answer.
        """
        client = KubeClient(spec)
        if (cluster := client.ray_cluster()) is None:
            raise PoolUnreachableError(_missing(spec))
        head = head_access.ray_head(spec, cluster.head_service, _token(client, spec, cluster, is_kept=True))
        return ScriptRunner(head, f"RayCluster {spec.namespace}/{spec.ray_cluster}", spec.name)

    def _ray_nodes(
        self, client: KubeClient, spec: PoolSpec, cluster: RayCluster, pods: Sequence[Pod]
    ) -> tuple[RayHead | None, list[ClusterNode] | None, str | None]:
        """Return the client of Ray's head, Ray's nodes, and why they are not known. Without a head's pod that has an
        address, Ray is not asked."""
        if not any(pod.is_head and pod.is_alive and pod.ip for pod in pods):
            return None, None, "the head has no pod that runs"
        silence = ""
        for is_kept in (True, False):  # The Secret may have another token now, and one lost answer is no lost head.
            try:
                head = head_access.ray_head(spec, cluster.head_service, _token(client, spec, cluster, is_kept=is_kept))
                return head, alive_nodes(head), None
            except PoolUnreachableError as error:
                silence = str(error)
        return None, None, silence


def _token(client: KubeClient, spec: PoolSpec, cluster: RayCluster, *, is_kept: bool) -> str:
    """Return Ray's token, and keep it in a file. If the file may be used, the Secret is only read without a file."""
    if not cluster.has_token:
        return ""
    if is_kept and (token := kept_token(spec.name)):
        return token
    token = client.token(cluster.token_secret)
    keep_token(spec.name, token)
    return token


def _missing(spec: PoolSpec) -> str:
    return f"RayCluster {spec.namespace}/{spec.ray_cluster} does not exist"


def _without_cluster(client: KubeClient, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
    was_ready = {node.id: "ray_node_id" in (node.endpoint or {}) for node in nodes}
    why = _missing(spec)
    if spec.makes_cluster and not all(was_ready.values()):
        pool = PoolRef(spec, len(nodes), time.time())
        refusal = _refusal(lambda: client.create_ray_cluster(resources.ray_cluster(pool, None), dry_run="All"))
        why = refusal or f"RayCluster {spec.namespace}/{spec.ray_cluster} is being created"
    return Seen(
        lost={row: _missing(spec) for row, ready in was_ready.items() if ready},
        waiting={row: Waiting(why) for row, ready in was_ready.items() if not ready},
    )


def _refusal(dry_run: Callable[[], object]) -> str | None:
    """Return the text with which the API refuses a change, or None. Nothing is changed."""
    try:
        dry_run()
    except (PoolUnreachableError, InvalidArgumentError, ConflictError) as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Sent:
    """A RayCluster after the patch of a plan, and its pods from before."""

    cluster: RayCluster
    pods: list[Pod]
    plan: scaling.Plan

    def left(self, pool: PoolRef, nodes: Sequence[NodeRef], client: KubeClient) -> dict[str, str | None]:
        """Return what is left of nodes that have to end, and of what the pool has beyond its size."""
        cluster, now, why, is_invalid = self.cluster, time.time(), "", False
        if reasons.is_ignored(cluster, now):
            warnings = client.warnings([cluster.uid])
            why = f": {reasons.cluster_problem(pool.spec, cluster, warnings, now)}"
            is_invalid = reasons.is_invalid(cluster, warnings)
        # The operator may still create pods until it has seen the smaller number of replicas. An invalid RayCluster
        # gets no pods, and is never seen.
        is_seen = cluster.observed >= cluster.generation or is_invalid
        unseen = None if is_seen else f"KubeRay's operator has not seen the smaller number of replicas yet{why}"
        # A pod of an ending node that is alive and not named stays, and gets another row.
        going = [pod for pod in self.pods if pod.uid in self.plan.doomed]
        kept = [(pod.uid, f"KubeRay has not deleted pod {pod.name} yet{why}") for pod in going if not pod.is_deleted]
        left = dict(kept) | {pod.uid: pod.ending for pod in going if pod.is_deleted}
        found: dict[str, str | None] = {}
        for node in nodes:
            uid = (node.endpoint or {}).get("pod_uid")
            found[node.id] = left.get(uid) if uid else None if node.is_head else unseen
        problem = kept[0][1] if kept else unseen
        return found | ({pool.id: problem} if problem else {})


def _send(client: KubeClient, pool: PoolRef, plan_for: Callable[[RayCluster, list[Pod]], scaling.Plan]) -> _Sent | None:
    """Send the patch of a plan. If the RayCluster has changed since it was read, look at it again.

    Returns:
        The result; None if the RayCluster does not exist.

    Raises:
        PoolUnreachableError: The RayCluster changes all the time, or the Kubernetes API does not answer.
    """
    for _ in range(_MOST_CONFLICTS):
        if (cluster := client.ray_cluster()) is None:
            return None
        pods = client.pods()
        plan = plan_for(cluster, pods)
        try:
            return _Sent(client.patch(plan.patch) if plan.patch else cluster, pods, plan)
        except ConflictError as error:
            log.info("%s", error)
    raise PoolUnreachableError(f"RayCluster {pool.spec.namespace}/{pool.spec.ray_cluster} changes all the time")


def _of_all(pool: PoolRef, nodes: Sequence[NodeRef], problem: str | None) -> dict[str, str | None]:
    """Return the same result for all nodes that have to end, and for the size of the pool."""
    return {node.id: problem for node in nodes} | ({pool.id: problem} if problem else {})


def _waiting(
    client: KubeClient, spec: PoolSpec, cluster: RayCluster, found: Matched, silence: str | None, workers: int
) -> dict[str, Waiting]:
    """Return the reasons of the rows that wait. Events are only requested if they may explain something."""
    pending = [pod.uid for pod in found.waiting.values() if pod and pod.phase == "Pending"]
    without_pod = None in found.waiting.values()
    warnings = client.warnings([cluster.uid, *pending] if without_pod else pending)
    no_pod = ""
    if without_pod:
        group = cluster.group(spec)
        problem = reasons.group_problem(group, workers)
        if problem is None and group.replicas < workers and not (cluster.is_suspended or cluster.is_deleted):
            change = [{"op": "add", "path": f"/spec/workerGroupSpecs/{group.index}/replicas", "value": workers}]
            problem = _refusal(lambda: client.patch(change, dry_run="All"))
            problem = problem or reasons.unsent_size(spec, cluster, group)
        no_pod = problem or reasons.cluster_problem(spec, cluster, warnings, time.time())
    return {
        row: Waiting(
            reasons.why_waiting(pod, warnings, client.log_end, silence) if pod else no_pod,
            _of_pod(spec, cluster, pod) if pod else None,
        )
        for row, pod in found.waiting.items()
    }


def _of_pod(spec: PoolSpec, cluster: RayCluster, pod: Pod) -> dict[str, str]:
    claim = cluster.claim
    is_held = claim is not None and claim.is_held
    return {
        "namespace": str(spec.namespace),
        "pod": pod.name,
        "pod_uid": pod.uid,
        "claimed_by": claim.id if claim and is_held else "",
        "found": f"{cluster.uid} {claim.epoch} {claim.replicas} {claim.min_replicas or 0}" if claim and is_held else "",
    }


def _arrival(spec: PoolSpec, cluster: RayCluster, pod: Pod, node: ClusterNode, python: str | None) -> Arrival:
    of_head = {
        "api": head_access.service_url(spec, cluster.head_service),
        "gcs": f"{pod.ip}:{GCS_PORT}",
        "service": cluster.head_service,
        "token_secret": cluster.token_secret if cluster.has_token else "",
    }
    return Arrival(
        {
            **_of_pod(spec, cluster, pod),
            "ray_node_id": node.id,
            "memory_bytes": str(node.memory_bytes),
            **(of_head if node.is_head else {}),
            **(versions.to_record({"python": python}) if python else {}),
        },
        node.cpus,
        node.gpus,
    )
