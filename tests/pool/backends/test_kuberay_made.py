"""`kuberay://` pools whose RayCluster shoal creates, in the double of the API (`tests/support/fake_kubernetes.py`)."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.api import ComputePool
from shoal.pool.backends import PoolRef
from shoal.pool.backends.kuberay import leases, made_cluster
from shoal.pool.backends.kuberay.backend import KubeRayBackend
from shoal.pool.backends.kuberay.client import KubeClient
from shoal.pool.backends.kuberay.reaper import main, reap
from shoal.pool.backends.kuberay.resources import MADE
from shoal.pool.reconcile.rounds import reconcile
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import RAY_CLUSTER_LEASE, START_TIMEOUT
from shoal.state import Store
from shoal.state.schema import Pool
from tests.kuberay.accounts import roles
from tests.pool.backends.test_kuberay import uses
from tests.support.fake_kubernetes import RAY_TOKEN, ray_cluster
from tests.support.pool_processes import node_rows

pytestmark = pytest.mark.server


def replicas(kube):
    return kube.group("c")["replicas"]


def made(kube, **options):
    """A pool with one node on a RayCluster that shoal creates."""
    return ComputePool(kube.uri("c", **{"max_nodes": 4, "image": "shoal:1", **options})).up()


def test_shoal_creates_a_cluster_scales_it_and_leaves_nothing(kube):
    pool = made(kube, cpus_per_node=2, memory_per_node="8Gi", service_account="ray", env_secret="store")
    cluster = kube.objects["rayclusters", "c"]
    assert cluster["metadata"]["labels"] == MADE
    for group in (kube.spec("c")["headGroupSpec"], kube.group("c")):
        pod = group["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"] == {"cpu": "2", "memory": "8Gi"}
        assert (pod["containers"][0]["image"], pod["serviceAccountName"]) == ("shoal:1", "ray")
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "store"}}]
    pool.scale(4)
    assert (replicas(kube), len(kube.pods())) == (3, 3)
    pool.scale(2)
    assert (replicas(kube), len(kube.pods())) == (1, 1)
    assert pool.endpoint().token() == RAY_TOKEN
    pool.down()
    assert kube.objects == {}
    assert node_rows() == []
    assert len(pool.up().get_nodes()) == 1
    pool.down()


def test_a_template_keeps_what_shoal_does_not_decide(kube, tmp_path):
    template = ray_cluster("other", replicas=2, max_replicas=2, authOptions={"mode": "token"}, suspend=True)
    template["spec"]["workerGroupSpecs"][0]["template"] = {"spec": {"nodeSelector": {"disk": "fast"}}}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(template))
    pool = made(kube, image="none", template=tmp_path / "cluster.yaml")
    assert kube.group("c")["template"] == {"spec": {"nodeSelector": {"disk": "fast"}}}
    assert (replicas(kube), len(kube.pods())) == (0, 0)
    pool.scale(4)
    assert replicas(kube) == 3
    pool.down()
    assert kube.objects == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: .*No such file.*Each host that starts nodes needs this file"),
        ("{", "cannot be read: it is neither YAML nor JSON"),
        ("kind: Pod", "contains Pod, and has to contain one RayCluster"),
        ("kind: RayCluster\nspec: {}", "has no worker group"),
        ("kind: RayCluster\nspec: {workerGroupSpecs: [{groupName: a}]}", "spec.headGroupSpec: Required value"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_before_anything_starts(kube, tmp_path, text, said):
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=said):
        made(kube, image="none", template=path)
    assert kube.objects == {}
    assert node_rows() == []


def test_rights_to_create_are_checked_before_anything_is_created(kube):
    for forbidden in ("create leases", "create rayclusters", "list pods"):
        kube.refused = {forbidden}
        with pytest.raises(PoolUnreachableError, match=f"does not allow to {forbidden}"):
            made(kube)
    assert kube.objects == {}


def test_what_others_have_created_is_neither_taken_nor_deleted(kube):
    kube.add("rayclusters", ray_cluster("c"))
    with pytest.raises(InvalidArgumentError, match=r"exists already, and shoal has not created it.*leave out image"):
        made(kube)
    del kube.objects["rayclusters", "c"]
    pool = made(kube)
    kube.change("rayclusters", "c", lambda found: found["metadata"].pop("labels"))
    pool.down()
    assert ("rayclusters", "c") in kube.objects


def test_the_clusters_of_a_shoal_that_is_gone_end_by_their_leases(kube, monkeypatch):
    pool = made(kube)
    pool.scale(2)
    monkeypatch.setattr(made_cluster, "_renewed", {})
    client = KubeClient(PoolSpec.parse(pool.describe().uri))
    later = datetime.now(UTC) + timedelta(seconds=RAY_CLUSTER_LEASE + 1)
    assert reap(client, later - timedelta(seconds=60)) == []
    lease = kube.objects["leases", "shoal-c"]["spec"]["renewTime"]
    reconcile(Store(), pool.name)  # whoever reconciles renews
    assert kube.objects["leases", "shoal-c"]["spec"]["renewTime"] > lease
    assert reap(client, later + timedelta(seconds=60)) == ["shoal-c"]
    kube.settle()
    assert kube.objects == {}
    for _ in range(8):  # somebody is there again, and still needs the pool
        reconcile(Store(), pool.name, clock=lambda: time.time() + START_TIMEOUT)
    assert ("rayclusters", "c") in kube.objects
    pool.down()
    assert kube.objects == {}


def test_a_decision_that_is_too_old_creates_nothing(kube):
    pool = made(kube)
    with Store().reading() as session:
        late = PoolRef.of(session.get_one(Pool, "c"), 2, time.time() - 120)
    pool.down()
    KubeRayBackend().start(late, [])
    assert kube.objects == {}


def test_the_roles_are_enough_and_none_of_their_rights_is_too_many(kube):
    role = roles()
    kube.allowed = uses(role["shoal"]) | uses(role["shoal-create"])
    pool = made(kube)
    pool.scale(2)
    KubeClient(
        PoolSpec.parse(pool.describe().uri)
    ).hold_lease()  # after a process that was killed before the RayCluster
    pool.down()
    assert uses(role["shoal-create"]) <= set(kube.requests)
    kube.allowed = uses(role["shoal-reaper"])
    kube.requests.clear()
    kube.add(
        "leases", leases.made("left") | {"spec": {"renewTime": "2026-01-01T00:00:00.0Z", "leaseDurationSeconds": 1}}
    )
    assert main(["ml", "--kubeconfig", str(kube.kubeconfig)]) == 0
    assert set(kube.requests) == kube.allowed
    assert kube.objects == {}
