"""Whose a RayCluster is, on a real control plane: a pool changes and deletes only what is proven its own, and is down
only when nothing of it is left, whatever other users have changed meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.pool.api import ComputePool
from shoal.pool.backends.interface import PoolRef
from shoal.pool.backends.kuberay.backend import KubeRayBackend
from shoal.pool.backends.kuberay.resources import CLAIM
from shoal.pool.reconciling import reconcile, sweep
from shoal.state import Store
from shoal.state.schema import Pool
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane
from tests.kuberay.pools import RAY, Kubernetes, Made, created
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until

client = pytest.importorskip("kubernetes.client")


@pytest.fixture
def made(plane: ControlPlane, cluster: Cluster, no_reconciler: None, namespace: str, tmp_path: Path) -> Iterator[Made]:
    with cluster.client() as api, created(plane, api, namespace, tmp_path) as kube:
        yield kube


def leases(kube: Kubernetes) -> list[str]:
    """The identities of all Leases."""
    found = client.CoordinationV1Api(kube.core.api_client).list_namespaced_lease(kube.namespace)
    return [lease.metadata.uid for lease in found.items]


UP = """
import sys
from shoal.pool.api import ComputePool
try:
    ComputePool(sys.argv[1]).up()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_pool_of_another_store_is_refused_and_the_first_one_keeps_its_cluster(
    made: Made, tmp_path: Path, monkeypatch
):
    pool = ComputePool(made.uri).up()
    pool.scale(2)
    before = made.everything(), leases(made)
    with monkeypatch.context() as other:
        other.setenv("SHOAL_HOME", str(tmp_path / "other"))
        run = subprocess.run([sys.executable, "-c", UP, made.uri], capture_output=True, text=True, timeout=120)
    assert "InvalidArgumentError" in run.stdout, run.stdout + run.stderr
    assert "another pool" in run.stdout
    assert (made.everything(), leases(made)) == before
    assert len(pool.get_nodes()) == 2
    pool.down()


def test_a_late_end_of_an_earlier_start_leaves_the_next_one(made: Made):
    pool = ComputePool(made.uri).up()
    with Store().reading() as session:
        late = PoolRef.of(session.get_one(Pool, made.name), 0, time.time())
    pool.down()
    pool.up()
    before = made.everything(), leases(made)
    KubeRayBackend().end(late, [])
    assert (made.everything(), leases(made)) == before
    pool.down()


def test_leases_of_others_and_pods_that_still_end_keep_no_pool_away(made: Made):
    before = made.everything()
    body: Any = {"metadata": {"name": "shoal-conform"}}
    client.CoordinationV1Api(made.core.api_client).create_namespaced_lease(made.namespace, body)
    pool = ComputePool(made.uri).up()
    pool.down(abandon=True)
    [head] = made.pods(heads=True)
    pool.up()
    assert head not in made.pods(heads=True)
    pool.down()
    wait_until(lambda: made.everything() - before == {"leases/shoal-conform"}, "only the other Lease", seconds=60)


def test_a_pool_whose_nodes_are_all_lost_gives_its_replicas_back(kube: Kubernetes):
    pool = ComputePool(kube.uri).up()
    pool.scale(3)
    kube.change({"op": "add", "path": "/spec/suspend", "value": True})

    def lost() -> bool:
        reconcile(Store(), pool.name)
        return node_rows() == []

    wait_until(lost, "the loss of all nodes", seconds=120, every=0.2)
    pool.down()
    assert kube.replicas() == 0
    kube.change({"op": "replace", "path": "/spec/suspend", "value": False})
    assert sweep(Store()) == []


def test_a_smaller_size_reaches_the_cluster_without_rows_of_lost_nodes(kube: Kubernetes):
    pool = ComputePool(kube.uri).up()
    pool.scale(3)
    kube.plane.remove_image(LIGHT_IMAGE)
    for pod in kube.pods():
        kube.core.delete_namespaced_pod(pod, kube.namespace, grace_period_seconds=0)

    def lost() -> bool:
        reconcile(Store(), pool.name)
        return len(node_rows()) == 1

    wait_until(lost, "the loss of the workers", seconds=60, every=0.2)
    kube.mend()
    pool.scale(1)
    assert kube.replicas() == 0
    wait_until(lambda: kube.pods() == [], "the end of the workers", seconds=60)


def annotated(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(found: dict[str, Any]) -> Any:
        claim = json.loads(found["metadata"]["annotations"][CLAIM])
        return {"metadata": {"annotations": {CLAIM: json.dumps({**claim, **changes})}}}

    return change


def in_group(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda found: {"spec": {"workerGroupSpecs": [{**found["spec"]["workerGroupSpecs"][0], **changes}]}}


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "annotation": lambda found: {"metadata": {"annotations": None}},
    "found replicas": annotated(replicas=3),
    "unreadable": lambda found: {"metadata": {"annotations": {CLAIM: "{"}}},
    "more replicas": in_group(replicas=4),
    "suspended": lambda found: {"spec": {"suspend": True}},
}
OF_MADE = EDITS | {
    "fewer replicas": in_group(replicas=0),
    "label": lambda found: {"metadata": {"labels": None}},
    "owner": lambda found: {"metadata": {"ownerReferences": None}},
    "epoch": annotated(epoch=99),
    "decision": annotated(decision=99),
    "pool": annotated(id="other/1.000"),
}


def edit(kube: Kubernetes, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the RayCluster as another user does."""
    path = f"/apis/ray.io/v1/namespaces/{kube.namespace}/rayclusters/{kube.name}"
    body = change(kube.plane.request("GET", path))
    kube.plane.request("PATCH", path, body, "application/merge-patch+json")


def test_nothing_is_left_of_a_created_cluster_that_others_have_edited(made: Made):
    before = made.everything()
    pool = ComputePool(made.uri)
    for name, change in OF_MADE.items():
        pool.up().scale(3)
        edit(made, change)
        pool.down()
        wait_until(lambda: made.everything() == before, f"the end of all after an edit: {name}", seconds=60)


def test_a_cluster_that_others_have_edited_gets_its_replicas_back(kube: Kubernetes):
    edit(kube, in_group(replicas=1))
    wait_until(lambda: len(kube.pods()) == 1, "the pod that the cluster had", seconds=60)
    pool = ComputePool(kube.uri)
    for name, change in EDITS.items():
        pool.up().scale(4)
        edit(kube, change)
        pool.down()
        assert kube.replicas() == 1, name
        edit(kube, lambda found: {"spec": {"suspend": False}})
        wait_until(lambda: len(kube.pods()) == 1, f"one pod after an edit: {name}", seconds=60)


def test_a_cluster_that_another_pool_has_taken_over_is_not_touched(kube: Kubernetes):
    pool = ComputePool(kube.uri).up()
    pool.scale(3)
    edit(kube, annotated(id="other/1.000"))
    path = f"/apis/ray.io/v1/namespaces/{kube.namespace}/rayclusters/{kube.name}"
    before = kube.plane.request("GET", path)["spec"]
    with Store().reading() as session:
        ref = PoolRef.of(session.get_one(Pool, kube.name), 0, time.time())
    assert "is used by another pool" in str(KubeRayBackend().end(ref, [])[ref.id])
    assert kube.plane.request("GET", path)["spec"] == before
    pool.down(abandon=True)


def test_the_same_object_is_needed_to_change_it(kube: Kubernetes):
    """A RayCluster that was deleted and created again under its name has another uid, and is another one."""
    pool = ComputePool(kube.uri).up()
    pool.scale(2)
    found = kube.custom.get_namespaced_custom_object(*RAY, kube.namespace, "rayclusters", kube.name)
    kube.custom.delete_namespaced_custom_object(*RAY, kube.namespace, "rayclusters", kube.name)
    wait_until(lambda: kube.pods(heads=True) == [], "the end of its pods", seconds=60)
    body = {key: found[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": kube.name}}
    body["spec"]["workerGroupSpecs"][0].update(replicas=2)
    kube.custom.create_namespaced_custom_object(*RAY, kube.namespace, "rayclusters", body)
    pool.down()
    assert kube.replicas() == 2
