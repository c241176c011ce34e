"""`kuberay://` pools whose RayCluster shoal creates, in the double of the API (`tests/support/fake_kubernetes.py`)."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import datetime, timedelta

import pytest
import yaml

from shoal.errors import InvalidArgumentError, PoolUnreachableError, ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.backends.interface import PoolRef
from shoal.pool.backends.kuberay import backend, scaling
from shoal.pool.backends.kuberay.backend import KubeRayBackend
from shoal.pool.backends.kuberay.client import ConflictError, KubeClient
from shoal.pool.backends.kuberay.reaper import main, reap
from shoal.pool.backends.kuberay.resources import CLAIM, ELASTIC, MADE, QUEUE
from shoal.pool.journal import commands
from shoal.pool.reconciling import reconcile, sweep
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import RAY_CLUSTER_LEASE, START_TIMEOUT
from shoal.state import Store
from shoal.state.schema import NodeState, Pool
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


def lease_of(kube):
    """The only Lease."""
    [name] = [name for kind, name in kube.objects if kind == "leases"]
    return kube.objects["leases", name]


def test_what_others_have_created_is_neither_taken_nor_deleted(kube):
    kube.add("rayclusters", ray_cluster("c"))
    with pytest.raises(InvalidArgumentError, match=r"exists already, and shoal has not created it.*leave out image"):
        made(kube)
    del kube.objects["rayclusters", "c"]
    pool = made(kube)
    kube.change("rayclusters", "c", lambda found: found["metadata"].update(labels={}, ownerReferences=[]))
    pool.down()  # another user has made the RayCluster his own
    assert ("rayclusters", "c") in kube.objects


def test_a_second_pool_of_the_same_cluster_is_refused_and_the_first_keeps_all(kube):
    pool = made(kube)
    pool.scale(2)
    before = {key: found["metadata"]["uid"] for key, found in kube.objects.items()}
    other = ComputePool(kube.uri("other", cluster="c", image="shoal:1", max_nodes=2))
    with pytest.raises(
        InvalidArgumentError, match=r'RayCluster ml/c is used by another pool, .*"c"\. Run .*kubectl delete'
    ):
        other.up()
    other.down()
    sweep(Store())
    kube.settle()
    assert {key: found["metadata"]["uid"] for key, found in kube.objects.items()} == before
    assert [node.was_ready for node in node_rows() if node.pool == "other"] == []
    assert len(pool.get_nodes()) == 2


def test_no_row_is_bound_to_a_pod_of_another_pool(kube):
    made(kube)
    other = ComputePool(kube.uri("other", cluster="c", image="shoal:1", max_nodes=2))
    with suppress(InvalidArgumentError):
        other._requests.carry_out(lambda session: bring_up(session, other), bring_up=True, is_async=True)
        reconcile(Store(), "other")
    for _ in range(3):
        reconcile(Store(), "other")
    assert [node.state for node in node_rows() if node.pool == "other"] == [NodeState.PLANNED]
    other.down()


def bring_up(session, pool):
    return commands.up(session, pool._requests.spec, holder="test", rollback_after=60.0, now=time.time())


def annotated(**changes):
    def change(found):
        claim = json.loads(found["metadata"]["annotations"][CLAIM])
        found["metadata"]["annotations"][CLAIM] = json.dumps({**claim, **changes})

    return change


def in_group(**changes):
    return lambda found: found["spec"]["workerGroupSpecs"][0].update(changes)


EDITS = {
    "label": lambda found: found["metadata"].pop("labels"),
    "owner": lambda found: found["metadata"].pop("ownerReferences"),
    "annotation": lambda found: found["metadata"].pop("annotations"),
    "annotation of another type": annotated(replicas="x"),
    "pool of the annotation": annotated(id="other/1.000"),
    "decision of the annotation": annotated(decision=99),
    "more replicas": in_group(replicas=3),
    "suspended": lambda found: found["spec"].update(suspend=True),
}


@pytest.mark.parametrize("edit", EDITS)
def test_nothing_is_left_of_a_cluster_in_which_another_user_has_changed_a_field(kube, edit):
    pool = made(kube)
    pool.scale(3)
    kube.change("rayclusters", "c", EDITS[edit])
    pool.down()
    kube.settle()
    assert kube.objects == {}
    assert node_rows() == []


def test_late_requests_of_an_earlier_start_of_the_pool_change_nothing(kube):
    pool = made(kube)
    client = KubeClient(PoolSpec.parse(pool.describe().uri))
    with Store().reading() as session:
        late = PoolRef.of(session.get_one(Pool, "c"), 0, time.time())
    cluster = client.ray_cluster()
    pool.down()
    pool.up()
    before = {key: found["metadata"]["uid"] for key, found in kube.objects.items()}
    with pytest.raises(ConflictError):
        client.delete_ray_cluster(cluster)
    assert KubeRayBackend().end(late, []) == {}
    client.release_lease(late.life)
    KubeRayBackend().renew(late)
    kube.settle()
    assert {key: found["metadata"]["uid"] for key, found in kube.objects.items()} == before
    pool.down()
    assert kube.objects == {}


def test_up_waits_for_the_pods_of_the_last_cluster_and_ignores_other_leases(kube, monkeypatch):
    monkeypatch.setattr("shoal.pool.waiting.DOWN_PATIENCE", 2.0)
    kube.add("leases", scaling.made("c", "another"))
    pool = made(kube)
    pool.down(abandon=True)
    head = kube.pods(heads=True)
    kube.stuck = set(head)
    with suppress(ScaleError):
        pool.up(rollback_after_seconds=0.5)
    assert not any(node.was_ready for node in node_rows())
    kube.stuck = set()
    pool.up()
    assert kube.pods(heads=True) != head
    pool.down()
    assert [key for key in kube.objects if key[0] != "leases"] == []
    assert lease_of(kube)["spec"]["holderIdentity"] == "another"


def test_the_clusters_of_a_shoal_that_is_gone_end_by_their_leases(kube, monkeypatch):
    pool = made(kube)
    pool.scale(2)
    monkeypatch.setattr(backend, "_renewed", {})
    client = KubeClient(PoolSpec.parse(pool.describe().uri))

    def pass_time(seconds):
        [entry] = lease_of(kube)["metadata"]["managedFields"]
        entry["time"] = (datetime.fromisoformat(entry["time"]) - timedelta(seconds=seconds)).isoformat()

    lease = lease_of(kube)["spec"]
    del lease["renewTime"]  # by another user
    pass_time(RAY_CLUSTER_LEASE - 60)
    assert reap(client) == []
    monkeypatch.setattr(scaling, "now", lambda: "2020-01-01T00:00:00.000000Z")  # the clock of this host is wrong
    reconcile(Store(), pool.name)  # whoever reconciles renews
    assert lease_of(kube)["spec"]["renewTime"] == scaling.now()
    pass_time(RAY_CLUSTER_LEASE - 60)
    assert reap(client) == []
    pass_time(120)
    assert reap(client) == [scaling.name_of("c", lease["holderIdentity"])]
    kube.settle()
    assert kube.objects == {}
    for _ in range(8):  # somebody is there again, and still needs the pool
        reconcile(Store(), pool.name, clock=lambda: time.time() + START_TIMEOUT)
    assert ("rayclusters", "c") in kube.objects
    pool.down()
    assert kube.objects == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": "9lives"}, "KubeRay accepts no cluster=9lives"),
        ({"cluster": "a" * 54}, "KubeRay accepts no cluster=aaa"),
        ({"service_account": "Ray"}, "KubeRay accepts no service_account=Ray"),
        ({"env_secret": "a_b"}, "KubeRay accepts no env_secret="),
        ({"queue": "nightly"}, "Kueue ends all nodes of a RayCluster whose size changes"),
    ],
)
def test_what_kuberay_or_kueue_would_refuse_later_is_refused_before_anything_starts(kube, options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        made(kube, **options)
    assert kube.objects == {}
    assert node_rows() == []


def test_a_cluster_in_a_queue_keeps_its_size_or_is_elastic(kube, tmp_path):
    pool = made(kube, queue="nightly", min_nodes=2, max_nodes=2)
    assert kube.objects["rayclusters", "c"]["metadata"]["labels"] == {**MADE, QUEUE: "nightly"}
    generation = kube.objects["rayclusters", "c"]["metadata"]["generation"]
    pool.alter(max_nodes=3)
    with pytest.raises(InvalidArgumentError, match="Kueue admits RayCluster ml/c as a whole"):
        pool.scale(3)
    with pool.lease(1):
        assert kube.objects["rayclusters", "c"]["metadata"]["generation"] == generation
    pool.down()
    template = ray_cluster("other")
    template["metadata"]["annotations"] = {ELASTIC: "true"}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(template))
    pool = made(kube, image="none", template=tmp_path / "cluster.yaml", queue="nightly")
    pool.scale(3)
    assert replicas(kube) == 2
    pool.down()


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
    client = KubeClient(PoolSpec.parse(pool.describe().uri))
    client.hold_lease(lease_of(kube)["spec"]["holderIdentity"])  # after a process that was killed before the RayCluster
    pool.down()
    assert uses(role["shoal-create"]) <= set(kube.requests)
    kube.allowed = uses(role["shoal-reaper"])
    kube.requests.clear()
    kube.add("leases", scaling.made("left", "1"))["metadata"].pop("managedFields")
    assert main(["ml", "--kubeconfig", str(kube.kubeconfig)]) == 0
    assert set(kube.requests) == kube.allowed
    assert kube.objects == {}
