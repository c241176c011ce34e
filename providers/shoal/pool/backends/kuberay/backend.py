"""Backend for Ray clusters on Kubernetes. KubeRay's operator starts and ends the pods; shoal changes the number of
replicas of one worker group, and names the pods that have to go. It uses a RayCluster that exists, or creates one.

A row of a `kuberay://` pool is assigned to a pod as soon as the pod exists, and is ready when the pod's Ray node has
joined the cluster. So demand, leases and rollback work as in other pools.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends import versions
from shoal.pool.backends.base import Arrival, ClusterBackend, NodeRef, PoolRef, Seen, Waiting
from shoal.pool.backends.kuberay import head_access, made_cluster, manifest, quiet, reasons, scaling
from shoal.pool.backends.kuberay.binding import Matched, match
from shoal.pool.backends.kuberay.client import ConflictError, KubeClient
from shoal.pool.backends.kuberay.resources import Pod, RayCluster
from shoal.pool.backends.ray.token_file import ca_path, keep_token, kept_token, remove_token
from shoal.pool.backends.ray_http import RayHead
from shoal.pool.backends.ray_nodes import GCS_PORT, ClusterNode, alive_nodes, python_version
from shoal.pool.backends.ray_scripts import ScriptRunner
from shoal.pool.endpoint import Endpoint
from shoal.pool.spec import PoolSpec
from shoal.state.home import home

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
            made_cluster.check(client, spec, cluster, size)
            if cluster is None:
                return
        if cluster is None:
            raise InvalidArgumentError(
                f"{_missing(spec)}: create it, give image= so that shoal creates it, or correct the URI of pool "
                f'"{spec.name}"'
            )
        group = cluster.group(spec)
        problem = reasons.group_problem(group, size - 1)
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

        As long as nothing has changed, only some of the calls send requests (see `quiet`).
        """
        return quiet.look(spec, nodes, self._look) if nodes else Seen()

    def _look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        try:
            client = KubeClient(spec)
            cluster = client.ray_cluster()
            if cluster is None:
                return _without_cluster(client, spec, nodes)
            pods = client.pods()
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
            for _ in range(_MOST_CONFLICTS):
                cluster = client.ray_cluster()
                if cluster is None and pool.spec.makes_cluster:
                    return made_cluster.create(client, pool)
                plan = scaling.plan_start(cluster, client.pods(), pool) if cluster else scaling.Plan()
                if plan.patch is None or _patched(client, plan.patch):
                    return
            log.warning("RayCluster %s/%s changes all the time", pool.spec.namespace, pool.spec.ray_cluster)
        except PoolUnreachableError as error:
            log.warning("%s", error)  # The error is only logged, because the next try requests the nodes again.

    def renew(self, spec: PoolSpec) -> None:
        """Renew the Lease of a RayCluster that shoal has created."""
        if spec.makes_cluster:
            made_cluster.renew(spec)

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Lower the replicas of the worker group to the size of the pool, name the pods that have to go, and check that
        they are gone. When the pool goes down, the RayCluster gets the replicas that it had when the pool came up, or
        is deleted if shoal has created it."""
        try:
            client = KubeClient(pool.spec)
            if pool.spec.makes_cluster and pool.size == 0:
                return made_cluster.delete(client, pool, list(nodes))
            for _ in range(_MOST_CONFLICTS):
                cluster = client.ray_cluster()
                if cluster is None:
                    return {node.id: None for node in nodes}
                pods = client.pods()
                plan = scaling.plan_end(cluster, pods, pool, nodes)
                if plan.patch is None:
                    break
                if changed := _patched(client, plan.patch):
                    cluster = changed
                    break
            else:
                raise PoolUnreachableError(
                    f"RayCluster {pool.spec.namespace}/{pool.spec.ray_cluster} changes all the time"
                )
        except (PoolUnreachableError, InvalidArgumentError, ConflictError) as error:
            hint = f"to stop trying, run `shoal pool down {pool.spec.name} --abandon`"
            return {node.id: f"pods may be left: {error}; {hint}" for node in nodes}
        by_uid = {pod.uid: pod for pod in pods}
        warnings = client.warnings([cluster.uid]) if reasons.is_ignored(cluster, time.time()) else {}
        return {node.id: _left(node, by_uid, plan.doomed, pool.spec, cluster, warnings) for node in nodes}

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """Build the head's addresses from the data in the head's row, and the way of this process to the head."""
        path = None
        if head.get("token_secret"):
            path = home() / keep_token(spec.name, KubeClient(spec).token(head["token_secret"]))
        way = head_access.access(spec, head["service"])
        return Endpoint(head["api"], head["gcs"], path, versions.recorded(head), ca_path(spec), way)

    def log(self, node: NodeRef) -> str:
        """Return the command that shows the log of the node's pod."""
        endpoint = node.endpoint or {}
        return f"kubectl logs -n {endpoint['namespace']} {endpoint['pod']}" if "pod" in endpoint else ""

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


def script_runner(spec: PoolSpec) -> ScriptRunner:
    """Return the runner of scripts on the RayCluster of a pool.

    Raises:
        PoolUnreachableError: The RayCluster does not exist, or the Kubernetes API does not answer.
    """
    client = KubeClient(spec)
    if (cluster := client.ray_cluster()) is None:
        raise PoolUnreachableError(_missing(spec))
    head = head_access.ray_head(spec, cluster.head_service, _token(client, spec, cluster, is_kept=True))
    return ScriptRunner(head, f"RayCluster {spec.namespace}/{spec.ray_cluster}", spec.name)


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
        refusal = _refusal(lambda: client.create_ray_cluster(manifest.ray_cluster(pool, None), dry_run="All"))
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


def _patched(client: KubeClient, patch: scaling.Patch) -> RayCluster | None:
    """Send a patch, and return the changed RayCluster. Return None if it has changed since it was read."""
    try:
        return client.patch(patch)
    except ConflictError as error:
        log.info("%s", error)
        return None


def _waiting(
    client: KubeClient, spec: PoolSpec, cluster: RayCluster, found: Matched, silence: str | None, workers: int
) -> dict[str, Waiting]:
    """Return the reasons of the rows that wait. Events are only requested if they may explain something."""
    pending = [pod.uid for pod in found.waiting.values() if pod and pod.phase == "Pending"]
    without_pod = None in found.waiting.values()
    warnings = client.warnings([cluster.uid, *pending] if without_pod else pending)
    no_pod = _why_no_pod(client, spec, cluster, workers, warnings) if without_pod else ""
    return {
        row: Waiting(
            reasons.why_waiting(pod, warnings, client.log_end, silence) if pod else no_pod,
            _of_pod(spec, pod) if pod else None,
        )
        for row, pod in found.waiting.items()
    }


def _why_no_pod(
    client: KubeClient, spec: PoolSpec, cluster: RayCluster, workers: int, warnings: Mapping[str, str]
) -> str:
    group = cluster.group(spec)
    if problem := reasons.group_problem(group, workers):
        return problem
    if group.replicas < workers and not (cluster.is_suspended or cluster.is_deleted):
        change = [{"op": "add", "path": f"/spec/workerGroupSpecs/{group.index}/replicas", "value": workers}]
        return _refusal(lambda: client.patch(change, dry_run="All")) or reasons.unsent_size(spec, cluster, group)
    return reasons.cluster_problem(spec, cluster, warnings, time.time())


def _of_pod(spec: PoolSpec, pod: Pod) -> dict[str, str]:
    return {"namespace": str(spec.namespace), "pod": pod.name, "pod_uid": pod.uid}


def _arrival(spec: PoolSpec, cluster: RayCluster, pod: Pod, node: ClusterNode, python: str | None) -> Arrival:
    of_head = {
        "api": head_access.service_url(spec, cluster.head_service),
        "gcs": f"{pod.ip}:{GCS_PORT}",
        "service": cluster.head_service,
        "token_secret": cluster.token_secret if cluster.has_token else "",
    }
    return Arrival(
        {
            **_of_pod(spec, pod),
            "ray_node_id": node.id,
            "memory_bytes": str(node.memory_bytes),
            **(of_head if node.is_head else {}),
            **(versions.to_record({"python": python}) if python else {}),
        },
        node.cpus,
        node.gpus,
    )


def _left(
    node: NodeRef,
    pods: Mapping[str, Pod],
    doomed: frozenset[str],
    spec: PoolSpec,
    cluster: RayCluster,
    warnings: Mapping[str, str],
) -> str | None:
    """Return what is left of a node that has to end, or None."""
    why = ""
    if is_ignored := reasons.is_ignored(cluster, time.time()):
        why = f": {reasons.cluster_problem(spec, cluster, warnings, time.time())}"
    uid = (node.endpoint or {}).get("pod_uid")
    if uid is None:
        # The operator may still create a pod for the row until it has seen the smaller number of replicas. An invalid
        # RayCluster gets no pods, and is never seen.
        is_safe = is_ignored and reasons.is_invalid(cluster, warnings)
        is_seen = node.is_head or is_safe or cluster.observed >= cluster.generation
        return None if is_seen else f"KubeRay's operator has not seen the smaller number of replicas yet{why}"
    pod = pods.get(uid)
    if pod is None or (pod.is_alive and pod.uid not in doomed):
        return None
    if pod.is_head:
        return None
    return pod.ending if pod.is_deleted else f"KubeRay has not deleted pod {pod.name} yet{why}"
