"""Pools whose RayClusters Kueue admits, on a real control plane with a real Kueue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import InvalidArgumentError, ScaleError
from shoal.pool.api import ComputePool
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane
from tests.kuberay.manifests import ray_cluster
from tests.kuberay.pools import RAY, Made, created, existing
from tests.support.waiting import wait_until

pytest.importorskip("kubernetes.client")

KUEUE = ("kueue.x-k8s.io", "v1beta2")
QUEUE = "nightly"
QUOTA_CPUS = 2


@pytest.fixture
def queue(plane: ControlPlane, cluster: Cluster, namespace: str) -> Iterator[str]:
    """A queue of Kueue with room for a head and three nodes of half a CPU."""
    from kubernetes.client import ApiException, CustomObjectsApi

    plane.start_kueue()
    with cluster.client() as client:
        custom = CustomObjectsApi(client)
        with_quota = {
            "metadata": {"name": namespace},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [
                    {
                        "coveredResources": ["cpu", "memory"],
                        "flavors": [
                            {
                                "name": namespace,
                                "resources": [
                                    {"name": "cpu", "nominalQuota": str(QUOTA_CPUS)},
                                    {"name": "memory", "nominalQuota": "16Gi"},
                                ],
                            }
                        ],
                    }
                ],
            },
        }
        kinds = {"resourceflavors": {"metadata": {"name": namespace}}, "clusterqueues": with_quota}
        for plural, body in kinds.items():
            custom.create_cluster_custom_object(*KUEUE, plural, _of_kueue(plural, body))
        local = {"metadata": {"name": QUEUE}, "spec": {"clusterQueue": namespace}}
        custom.create_namespaced_custom_object(*KUEUE, namespace, "localqueues", _of_kueue("localqueues", local))
        yield QUEUE
        for plural in reversed(kinds):
            custom.delete_cluster_custom_object(*KUEUE, plural, namespace)

            def gone(plural: str = plural) -> bool:
                try:
                    custom.get_cluster_custom_object(*KUEUE, plural, namespace)
                except ApiException as error:
                    return bool(error.status == 404)
                return False

            wait_until(gone, f"the end of {plural}", seconds=60)


def _of_kueue(plural: str, body: dict[str, object]) -> dict[str, object]:
    kind = {"resourceflavors": "ResourceFlavor", "clusterqueues": "ClusterQueue", "localqueues": "LocalQueue"}[plural]
    return {"apiVersion": "/".join(KUEUE), "kind": kind, **body}


@pytest.fixture
def made(
    plane: ControlPlane, cluster: Cluster, queue: str, no_reconciler: None, namespace: str, tmp_path: Path
) -> Iterator[Made]:
    with cluster.client() as api, created(plane, api, namespace, tmp_path) as kube:
        yield kube


def uri(made: Made, template: Path, sizes: str) -> str:
    return (
        f"kuberay://{made.namespace}/{made.name}?{sizes}&kubeconfig={made.kubeconfig}&template={template}&queue={QUEUE}"
    )


def template(folder: Path, **annotations: str) -> Path:
    body = ray_cluster("conform", LIGHT_IMAGE, workers=0)
    body["metadata"]["annotations"] = annotations
    (folder / "cluster.json").write_text(json.dumps(body))
    return folder / "cluster.json"


def uids(made: Made) -> dict[str, str]:
    found = made.core.list_namespaced_pod(made.namespace, label_selector=f"ray.io/cluster={made.name}")
    return {pod.metadata.name: pod.metadata.uid for pod in found.items if pod.metadata.deletion_timestamp is None}


def test_a_pool_of_one_size_is_admitted_and_leaves_nothing(made: Made, tmp_path: Path):
    before = made.everything()
    pool = ComputePool(uri(made, template(tmp_path), "min_nodes=2&max_nodes=2")).up()
    assert len(pool.get_nodes()) == 2
    assert any("workloads/" in each for each in made.everything())
    pool.down()
    wait_until(lambda: made.everything() == before, "the end of all that was created", seconds=120)


def test_a_pool_that_may_scale_needs_elastic_jobs(made: Made, tmp_path: Path):
    before = made.everything()
    with pytest.raises(InvalidArgumentError, match="Kueue ends all nodes of a RayCluster whose size changes"):
        ComputePool(uri(made, template(tmp_path), "max_nodes=3")).up()
    assert made.everything() == before


def test_an_elastic_pool_scales_and_keeps_its_pods_also_above_the_quota(made: Made, tmp_path: Path):
    before = made.everything()
    elastic = template(tmp_path, **{"kueue.x-k8s.io/elastic-job": "true"})
    pool = ComputePool(uri(made, elastic, "min_nodes=1&max_nodes=6")).up()
    first = uids(made)
    pool.scale(3)
    assert first.items() <= uids(made).items(), "a pod was replaced"
    three = uids(made)
    with pytest.raises(ScaleError, match="its queue may have no quota left"):
        pool.scale(5, options={"rollback_after_seconds": 60})
    assert three.items() <= uids(made).items(), "a pod was ended by the scale above the quota"
    assert len(pool.get_nodes()) == 3
    pool.scale(1)
    wait_until(lambda: len(uids(made)) == 1, "the end of two pods", seconds=60)
    assert uids(made).items() <= three.items()
    pool.down()
    wait_until(lambda: made.everything() == before, "the end of all that was created", seconds=120)


def test_a_cluster_of_others_that_kueue_admits_is_not_scaled(
    plane: ControlPlane, cluster: Cluster, queue: str, no_reconciler: None, namespace: str, tmp_path: Path
):
    with cluster.client() as api, existing(plane, api, namespace, tmp_path) as kube:
        kube.custom.delete_namespaced_custom_object(*RAY, namespace, "rayclusters", kube.name)
        wait_until(lambda: not kube.pods(heads=True), "the end of the first cluster", seconds=60)
        body = ray_cluster(kube.name, LIGHT_IMAGE, workers=2)
        body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue}
        kube.custom.create_namespaced_custom_object(*RAY, namespace, "rayclusters", body)
        wait_until(lambda: len(kube.pods()) == 2, "Kueue's admission", seconds=120)
        pool = ComputePool(kube.uri.replace("max_nodes=4", "min_nodes=2&max_nodes=4")).up()
        pods = kube.pods(heads=True)
        with pytest.raises((InvalidArgumentError, ScaleError), match="Kueue admits RayCluster"):
            pool.scale(4, options={"rollback_after_seconds": 60})
        assert kube.pods(heads=True) == pods
        pool.down()
        assert kube.pods(heads=True) == pods
        kube.custom.delete_namespaced_custom_object(*RAY, namespace, "rayclusters", kube.name)
