"""`kuberay://`: RayClusters on Kubernetes, in the double of the API (`tests/support/fake_kubernetes.py`)."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode

import pytest

from shoal.errors import InvalidArgumentError, PoolUnreachableError, ScaleError
from shoal.jobs.reconcile.look import JobClient
from shoal.pool.api import ComputePool
from shoal.pool.backends.interface import NodeRef, PoolRef
from shoal.pool.backends.kuberay import head_access, watch
from shoal.pool.backends.kuberay.backend import KubeRayBackend
from shoal.pool.backends.kuberay.reasons import why_lost
from shoal.pool.backends.kuberay.resources import CLAIM, QUEUE, Pod, RayCluster
from shoal.pool.backends.kuberay.scaling import plan_end, plan_start
from shoal.pool.reconciling import reconcile, sweep
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import START_TIMEOUT
from shoal.state import Store
from shoal.state.schema import NodeState, Pool
from tests.kuberay.accounts import roles
from tests.support.fake_kubernetes import RAY_TOKEN, USER_TOKEN, ray_cluster
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

SOON = {"rollback_after_seconds": 0.5}


def attach(kube, **options):
    """A pool with one node on a RayCluster of the name c."""
    return ComputePool(kube.uri("c", **{"max_nodes": 4, **options})).up()


def replicas(kube):
    return kube.group("c")["replicas"]


def claim(kube):
    return json.loads(kube.objects["rayclusters", "c"]["metadata"]["annotations"][CLAIM])


def waits(pool):
    """Why the first node that is not ready waits, as users read it."""
    reconcile(Store(), pool.name)
    reconcile(Store(), pool.name)
    status = pool.describe()
    assert status.reason == f"{status.pending[0].name} is not ready: {status.pending[0].error}"
    return status.pending[0].error


def test_down_restores_the_replicas_that_were_found_and_deletes_nothing_else(kube):
    kube.add("rayclusters", ray_cluster("c", replicas=1, max_replicas=3))
    kube.settle()
    [found] = kube.pods()
    pool = attach(kube)
    assert (replicas(kube), claim(kube)["replicas"]) == (1, 1)
    pool.scale(4)
    assert (replicas(kube), len(kube.pods())) == (3, 3)
    assert found in {node.endpoint["pod"] for node in node_rows()}
    pool.scale(1)
    assert (replicas(kube), kube.pods()) == (1, [found])
    pool.scale(3)
    pool.down()
    assert (replicas(kube), kube.pods()) == (1, [found])
    assert claim(kube)["replicas"] is None


def test_a_rollback_names_its_own_pods_and_keeps_the_others(kube):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(2)
    [older] = kube.pods()
    kube.become = lambda pod: {"phase": "Pending"}
    with pytest.raises(ScaleError, match="2 of 4 nodes were ready at the deadline") as caught:
        pool.scale(4, options=SOON)
    assert set(caught.value.nodes) == {"c-2", "c-3"}
    assert all("starts" in error for error in caught.value.nodes.values())
    kube.settle()
    assert (replicas(kube), kube.pods()) == (1, [older])


def test_pods_that_no_row_knows_yet_are_named_too(kube):
    """A pod is created between the look at the pods and the rollback."""
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(2)
    kube.change("rayclusters", "c", lambda made: made["spec"]["workerGroupSpecs"][0].update(replicas=3))
    kube.settle()
    held, *spare = kube.pods()
    with Store().reading() as session:
        ref = PoolRef.of(session.get_one(Pool, "c"), 2, 0.0, frozenset({kube.objects["pods", held]["metadata"]["uid"]}))
    assert KubeRayBackend().end(ref, [NodeRef("0", "never", "c", 1, None)]) != {}
    kube.settle()
    assert kube.pods() == [held]
    assert set(kube.group("c")["scaleStrategy"]["workersToDelete"]) == set(spare)


def test_a_size_above_the_groups_limit_is_refused_at_once(kube):
    kube.add("rayclusters", ray_cluster("c", max_replicas=2))
    pool = attach(kube)
    before = kube.objects["rayclusters", "c"]["metadata"]["resourceVersion"]
    with pytest.raises(InvalidArgumentError, match=r"cannot have 4 nodes: worker group small has maxReplicas=2"):
        pool.scale(4)
    assert kube.objects["rayclusters", "c"]["metadata"]["resourceVersion"] == before


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ({"suspend": True}, {}, r"RayCluster ml/c is suspended: set spec\.suspend to false"),
        ({"workerGroupSpecs": []}, {}, "has no worker group"),
        ({}, {"group": "big"}, "has no worker group big; its groups: small"),
        ({"workerGroupSpecs": [{"groupName": "a"}, {"groupName": "b"}]}, {}, r"several worker groups \(a, b\).*group="),
        ({"workerGroupSpecs": [{"groupName": "a", "numOfHosts": 2}]}, {}, "numOfHosts=2.*one pod per replica"),
        (
            {},
            {"cluster": "other"},
            'RayCluster ml/other does not exist: create it, give image=.*, or correct the URI of pool "c"',
        ),
        ({}, {"kubeconfig": "/nowhere"}, "kubeconfig file /nowhere cannot be read"),
        ({}, {"context": "other"}, "context=other cannot be used"),
    ],
)
def test_what_shoal_cannot_scale_is_refused_before_anything_changes(kube, spec, options, said):
    kube.add("rayclusters", ray_cluster("c", **spec))
    with pytest.raises(InvalidArgumentError, match=said):
        attach(kube, **options)
    assert node_rows() == []
    assert "annotations" not in kube.objects["rayclusters", "c"]["metadata"]


def test_credentials_and_rights_are_checked_before_anything_changes(kube):
    kube.add("rayclusters", ray_cluster("c"))
    for forbidden in ("get rayclusters", "list pods", "patch rayclusters"):
        kube.refused = {forbidden}
        with pytest.raises(
            PoolUnreachableError, match=f"does not allow to {forbidden}.* in namespace ml.*Apply the Role"
        ):
            attach(kube)
    kube.refused = set()
    kube.has_crd = False
    with pytest.raises(PoolUnreachableError, match="knows no RayClusters: install KubeRay's operator"):
        attach(kube)
    kube.has_crd = True
    kube.write_kubeconfig(token="expired")
    with pytest.raises(PoolUnreachableError, match=r"does not accept the credentials.*log in again"):
        attach(kube)
    kube.write_kubeconfig(server="http://127.0.0.1:1")
    with pytest.raises(PoolUnreachableError, match=r"the Kubernetes API at http://127.0.0.1:1 does not answer"):
        attach(kube)
    assert node_rows() == []
    kube.write_kubeconfig()
    assert attach(kube).get_nodes() == [{"name": "c-0", "cpus": 1, "gpus": 0}]  # the file is read again


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("answer", [429, 0])
def test_one_answer_that_is_lost_shows_no_node_as_failed(kube, turn, answer):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    kube.next_answers = [None] * turn + [answer]
    assert [node.state for node in pool.describe().active] == ["ready"]
    assert kube.next_answers == []


@pytest.fixture
def exec_token(kube):
    """Let the token come from a program that does not say when it ends; return the file from which it prints."""
    config, file = json.loads(kube.kubeconfig.read_text()), kube.kubeconfig.with_name("token")
    made = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "spec": {}}
    made["status"] = {"token": config["users"][0]["user"].pop("token")}
    file.write_text(json.dumps(made))
    plugin = {"apiVersion": made["apiVersion"], "command": "/bin/cat", "args": [str(file)], "interactiveMode": "Never"}
    config["users"][0]["user"]["exec"] = plugin
    kube.kubeconfig.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("is_old", [False, True])
def test_a_program_that_gives_tokens_runs_again_when_the_token_is_refused_or_old(kube, exec_token, monkeypatch, is_old):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    exec_token.write_text(exec_token.read_text().replace(USER_TOKEN, "kube-user-2"))
    if is_old:
        now = time.monotonic()
        monkeypatch.setattr(head_access, "monotonic", lambda: now + 301)
        assert "credentials" in pool.describe().reason
    kube.user_token = "kube-user-2"
    assert len(pool.get_nodes()) == 1


class Rounds:
    """Rounds of a process that reconciles a pool and shows it, one each second of its own clock."""

    def __init__(self, monkeypatch, kube):
        kube.add("rayclusters", ray_cluster("c"))
        self.kube, self.now = kube, time.monotonic()
        self.pool = attach(kube)
        self.pool.scale(3)
        monkeypatch.setattr(watch, "monotonic", lambda: self.now)
        monkeypatch.setattr(watch, "PERIOD", 5.0)
        monkeypatch.setattr(watch.PoolView, "_watch", START_WATCH)
        self.view = watch.view(PoolSpec.parse(kube.uri("c")))

    def run(self, seconds):
        """The requests that are sent in these seconds."""
        self.kube.requests.clear()
        for _ in range(seconds):
            self.now += 1
            reconcile(Store(), self.pool.name)
            self.pool.describe()
        return self.kube.requests

    def lose_a_pod(self):
        """Delete a worker's pod, and return the question whether the pool has noticed it."""
        [*_, gone] = self.kube.pods()
        self.kube.delete_pod(gone)

        def is_noticed():
            reconcile(Store(), self.pool.name)
            of_pod = [node for node in node_rows() if (node.endpoint or {}).get("pod") == gone]
            return all(node.state == NodeState.FAILED for node in of_pod)

        return is_noticed

    def run_until_watched(self):
        self.run(7)
        wait_until(lambda: self.view._is_watched, "both watches")
        self.run(2)


START_WATCH = watch.PoolView._watch


@pytest.fixture
def rounds(kube, monkeypatch):
    return Rounds(monkeypatch, kube)


def test_an_idle_pool_that_is_watched_sends_few_requests(rounds):
    rounds.run_until_watched()
    # Ray's nodes four times a minute, the RayCluster and its pods once in two.
    assert len(rounds.run(120)) <= 12
    before = rounds.view._changes
    is_noticed = rounds.lose_a_pod()
    wait_until(lambda: rounds.view._changes > before, "the report of the change")
    rounds.run(5)
    assert is_noticed()


def test_an_account_without_the_right_to_watch_looks_more_often(rounds):
    rounds.kube.refused = {"watch rayclusters"}
    rounds.run(10)
    assert len(rounds.run(60)) <= 40
    is_noticed = rounds.lose_a_pod()
    rounds.run(5)
    assert is_noticed()


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_change_is_seen_though_no_watch_reports_it(rounds, is_cut):
    rounds.run_until_watched()
    if is_cut:  # The API has gone away for a moment, and comes back without a pod.
        rounds.kube.user_token, token = "other", rounds.kube.user_token
        rounds.kube.cuts += 1
        wait_until(lambda: not rounds.view._is_watched, "the end of the watches")
        rounds.kube.user_token = token
    else:  # The connection is dead, and nobody says so.
        rounds.kube.is_silent = True
    is_noticed = rounds.lose_a_pod()
    rounds.run(5 if is_cut else 120)
    assert is_noticed()


def scheduled(reason, message):
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]}


def container(state, **more):
    return {"containerStatuses": [{"name": "ray-worker", "image": "no/such:1", "state": state, **more}]}


CRASHED = {"lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            scheduled("Unschedulable", "0/3 nodes are available: 3 Insufficient cpu."),
            "is not scheduled: Unschedulable: 0/3 nodes are available: 3 Insufficient cpu.",
        ),
        (scheduled("SchedulingGated", "Scheduling is blocked"), "its queue may have no quota left"),
        (
            container({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}),
            "image no/such:1 cannot be pulled (ImagePullBackOff: not found): check the image's name",
        ),
        (
            container({"waiting": {"reason": "CrashLoopBackOff"}}, **CRASHED),
            "container ray-worker ends again and again (OOMKilled, exit code 137); the end of its log: no memory",
        ),
        (
            container({"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "x" not found'}}),
            'container ray-worker does not start (CreateContainerConfigError: secret "x" not found)',
        ),
        ({"phase": "Running", "podIP": "10.9.9.9"}, "runs, and its Ray node has not joined the cluster yet"),
    ],
)
def test_why_a_pod_is_not_ready_is_shown_at_once_and_in_the_error(kube, status, said):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    kube.log = "no memory postgresql://me:open-sesame@db/x\n"
    kube.become = lambda pod: {"phase": "Pending", **status}
    pool.scale(2, is_async=True)
    assert said in (reason := waits(pool))
    assert "open-sesame" not in reason
    [row] = [node for node in node_rows() if not node.is_head]
    assert row.endpoint["pod"] == kube.pods()[0]
    with pytest.raises(ScaleError) as caught:
        pool.scale(3, options=SOON)
    assert any(said in error for error in caught.value.nodes.values())
    assert said in str(pool.describe().reason)


def test_a_head_that_does_not_answer_at_api_is_named(kube):
    kube.add("rayclusters", ray_cluster("c"))
    with pytest.raises(ScaleError, match=r"runs, and the Ray head .* at http://127.0.0.1:1, as api= .* answer"):
        ComputePool(kube.uri("c", max_nodes=4, api="http://127.0.0.1:1")).up(rollback_after_seconds=0.5)


def test_why_there_is_no_pod_is_shown_at_once(kube, monkeypatch):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    kube.pod_quota = 1
    pool.scale(2, is_async=True)
    assert "KubeRay cannot create the pod" in (reason := waits(pool))
    assert "exceeded quota: pods" in reason
    kube.pod_quota = 100
    kube.operates = False
    kube.change("rayclusters", "c", lambda made: made["spec"]["workerGroupSpecs"][0].update(maxReplicas=5))
    kube.change("rayclusters", "c", lambda made: made["status"].update(conditions=[]), is_status=True)
    monkeypatch.setattr("shoal.pool.backends.kuberay.reasons._OPERATOR_PATIENCE", -1.0)
    assert waits(pool) == (
        "KubeRay's operator does not act on RayCluster ml/c: check that the operator runs and watches namespace ml"
    )
    kube.operates = True
    kube.add("secrets", {"metadata": {"name": "c"}, "data": {"auth_token": b64encode(RAY_TOKEN.encode()).decode()}})
    auth = {"mode": "token"}
    kube.change("rayclusters", "c", lambda made: made["spec"].update(rayVersion="2.40.0", authOptions=auth))
    assert "RayCluster ml/c is invalid: InvalidRayClusterSpec" in waits(pool)
    pool.down()  # although the operator sees no smaller number of replicas


def test_a_mount_that_fails_is_only_in_the_events(kube):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    kube.become = lambda pod: {"phase": "Pending", **container({"waiting": {"reason": "ContainerCreating"}})}
    pool.scale(2, is_async=True)
    assert "starts" in waits(pool)
    kube._event(kube.pods()[0], "FailedMount", 'configmap "x" not found')
    assert 'does not start: FailedMount: configmap "x" not found' in waits(pool)
    kube.refused = {"list events"}
    assert "starts" in waits(pool)


def lost(pool):
    """Why the worker was lost, after one look."""
    seen = KubeRayBackend().look(PoolSpec.parse(pool.describe().uri), [NodeRef.of(node) for node in node_rows()])
    return [*seen.lost.values(), seen.silence]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "has ended: Evicted: low on memory"),
        (
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]},
            "ends: PreemptionByScheduler",
        ),
        (container({"running": {}}, **CRASHED), "Ray has ended in pod .* \\(OOMKilled, exit code 137\\)"),
    ],
)
def test_why_a_node_was_lost_is_said_and_it_is_replaced(kube, change, said):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(2)
    [pod] = kube.pods()
    kube.operates = False
    kube.change("pods", pod, lambda made: made["status"].update({**change, "ray": False}), is_status=True)
    [reason, silence] = lost(pool)
    assert silence is None

    assert re.search(said, reason), reason


def test_a_pod_whose_machine_is_gone_does_not_keep_its_replacement_away(kube):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(2)
    [pod] = kube.pods()
    kube.stuck = {pod}
    kube.delete_pod(pod)
    for _ in range(6):
        reconcile(Store(), pool.name)
    assert len(pool.get_nodes()) == 2
    assert pool.describe().leaving[0].error == f"pod {pod} is being deleted"
    kube.stuck = set()
    pool.down()


def test_a_replacement_whose_pod_is_on_a_machine_that_is_gone_gets_another_pod(kube):
    """Ray notices the loss of a machine minutes before Kubernetes does: until then, the pod seems to run."""
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(2)
    [pod] = kube.pods()
    kube.change("pods", pod, lambda made: made["status"].update(ray=False), is_status=True)
    for _ in range(4):
        reconcile(Store(), pool.name, clock=lambda: time.time() + START_TIMEOUT)
    assert f"pod {pod} runs" in str(pool.describe().pending[0].error)
    kube.stuck = {pod}
    kube.delete_pod(pod)
    for _ in range(4):
        reconcile(Store(), pool.name, clock=lambda: time.time() + 2 * START_TIMEOUT)
    assert len(pool.get_nodes()) == 2
    kube.stuck = set()


def test_all_workers_of_a_machine_that_is_gone_are_replaced(kube):
    """After it has deleted one of them, KubeRay does nothing in the group until the pod's object is gone."""
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(3)
    lost = kube.pods()
    kube.stuck = set(lost)
    for pod in lost:
        kube.change("pods", pod, lambda made: made.update(spec={"nodeName": "m-1"}))
        kube.change("pods", pod, lambda made: made["status"].update(ray=False), is_status=True)
    condition = {
        "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "lastTransitionTime": "9999",
    }  # fmt: skip
    kube.change("pods", lost[0], lambda made: made["status"].update(conditions=[condition]), is_status=True)
    kube.delete_pod(lost[0])  # and the other one a moment later
    for turn in range(6):
        reconcile(Store(), pool.name, clock=lambda: time.time() + START_TIMEOUT)
        if turn == 2:
            kube.delete_pod(lost[1])
    assert len(pool.get_nodes()) == 3
    kube.stuck = set()


def test_if_only_ray_has_ended_the_pods_stay_and_get_new_rows(kube):
    """As after the head's container has ended without fault tolerance of the GCS: all of Ray's ids are new."""
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(3)
    before = kube.pods(heads=True)
    kube.ray_restarts += 1
    for _ in range(8):  # some minutes later: nodes that are lost soon after their start are replaced after a pause
        reconcile(Store(), pool.name, clock=lambda: time.time() + START_TIMEOUT)
    assert kube.pods(heads=True) == before
    assert [node["name"] for node in pool.get_nodes()] == ["c-3", "c-4", "c-5"]


def test_of_two_writers_at_once_the_later_looks_again(kube):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    left = [3]

    def write():
        if left[0]:
            left[0] -= 1
            kube.change("rayclusters", "c", lambda made: made["metadata"].update(labels={"n": str(left[0])}))

    kube.before_patch = write
    assert pool.scale(2) is True
    assert left == [0]


def test_an_older_decision_changes_nothing(kube):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    with Store().reading() as session:
        late = PoolRef.of(session.get_one(Pool, "c"), 4, 0.0)
    pool.scale(2)
    KubeRayBackend().start(late, [])
    assert replicas(kube) == 1
    pool.down()
    KubeRayBackend().start(late, [])
    assert replicas(kube) == 0


def test_another_pool_may_not_use_the_cluster_until_the_first_is_down(kube):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    other = ComputePool(kube.uri("other", cluster="c"))
    with pytest.raises(
        InvalidArgumentError, match=r'RayCluster ml/c is used by another pool, .*"c"\. Run `shoal pool down`'
    ):
        other.up()
    pool.down()
    assert len(other.up().get_nodes()) == 1
    other.down()


def test_raised_and_lowered_beside_rays_autoscaler():
    """Pure: with the autoscaler, the pool raises `minReplicas`, names its own pods, and leaves the autoscaler's."""

    def seen(**group):
        made = ray_cluster("c", replicas=1, low=0, max_replicas=9, enableInTreeAutoscaling=True)
        made["metadata"] |= {"resourceVersion": "7", "generation": 1}
        made["spec"]["workerGroupSpecs"][0].update(group)
        return made

    def changed(plan):
        return {step["path"].rpartition("/")[2]: step["value"] for step in plan.patch if "/spec/" in step["path"]}

    spec = PoolSpec.parse("kuberay://ml/c?max_nodes=9")
    up = plan_start(RayCluster.of(seen()), [], PoolRef(spec, 4, 0.0, "c/1", 1, 1))
    assert changed(up) == {"groupName": "small", "replicas": 3, "minReplicas": 3}
    after = seen(replicas=5, minReplicas=3)
    after["metadata"]["annotations"] = {
        CLAIM: next(step["value"] for step in up.patch if "annotations/" in step["path"])
    }
    pods = [Pod(f"p{n}", f"u{n}", "small", False, "1", "Running") for n in range(5)]
    ending = [NodeRef(str(n), "x", "c", 1, None, endpoint={"pod_uid": f"u{n}", "ray_node_id": "r"}) for n in (1, 2)]
    down = plan_end(RayCluster.of(after), pods, PoolRef(spec, 2, 0.0, "c/1", 1, 2, frozenset({"u0"})), ending)
    assert changed(down) == {
        "groupName": "small", "replicas": 3, "minReplicas": 0, "scaleStrategy": {"workersToDelete": ["p1", "p2"]}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("manager", "autoscales", "said"),
    [
        ("python-requests", True, "ended by Ray's autoscaler, which ends idle nodes of the pool as well: set enable"),
        ("kubectl-edit", False, r"ended by kubectl-edit \(workersToDelete\)"),
        ("shoal", True, "it was deleted, .* or Ray's autoscaler has ended it, which ends idle nodes"),
    ],
)
def test_a_program_that_names_a_pod_for_deletion_is_named(manager, autoscales, said):
    """Pure: the autoscalers v1 and v2 name the pods of idle nodes, and change the replicas."""
    made = ray_cluster("c", enableInTreeAutoscaling=autoscales)
    made["spec"]["workerGroupSpecs"][0]["scaleStrategy"] = {"workersToDelete": ["c-w-1"]}
    fields = {"f:spec": {"f:workerGroupSpecs": {}}}
    writers = [("kubectl", 1), ("shoal", 2), (manager, 3)]
    made["metadata"]["managedFields"] = [
        {"manager": name, "time": f"2026-01-01T00:00:0{second}Z", "fieldsV1": fields} for name, second in writers
    ]
    made["metadata"]["resourceVersion"] = "7"
    endpoint = {"pod": "c-w-1", "pod_uid": "1"}
    assert re.search(said, why_lost(endpoint, None, {}, RayCluster.of(made)))


@pytest.mark.parametrize("size", [0, 1])
def test_a_smaller_size_reaches_a_cluster_whose_lost_nodes_have_no_rows(kube, size):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    pool.scale(3)
    kube.change("rayclusters", "c", lambda made: made["spec"].update(suspend=True))
    for _ in range(8):
        reconcile(Store(), pool.name)
    assert node_rows() == []
    if size:
        kube.change("rayclusters", "c", lambda made: made["spec"].update(suspend=False))
        pool.scale(size)
    else:
        pool.down()
    assert replicas(kube) == 0
    assert sweep(Store()) == []


def plan_of_down(found="uid-1 1 1 0", *, size=0, **metadata):
    """Pure: the plan of a pool that goes down from 4 to 1 node, in a group of 3 workers of which it has found one."""
    made = ray_cluster("c", replicas=3, max_replicas=9)
    made["metadata"] |= {"resourceVersion": "7", "uid": "uid-1", **metadata}
    pods = [Pod(f"p{n}", f"u{n}", "small", False, "1", "Running", created=str(n)) for n in range(3)]
    ref = PoolRef(PoolSpec.parse("kuberay://ml/c?max_nodes=9"), size, 0.0, "c/1", 1, 5, frozenset(), found)
    return plan_end(RayCluster.of(made), pods, ref, [])


def claimed(**changes):
    claim = {"id": "c/1", "epoch": 1, "decision": 4, "at": 0.0, "replicas": 1, "min_replicas": 0}
    return {"annotations": {CLAIM: json.dumps(claim | changes)}}


@pytest.mark.parametrize(
    "metadata", [{}, claimed(), claimed(replicas=3), claimed(replicas="x"), {"annotations": {CLAIM: "{"}}]
)
def test_down_restores_what_was_found_whatever_became_of_the_annotation(metadata):
    plan = plan_of_down(**metadata)
    assert plan.doomed == {"u1", "u2"}
    steps = {step["path"]: step["value"] for step in plan.patch}
    assert steps["/spec/workerGroupSpecs/0/replicas"] == 1
    assert (steps["/metadata/uid"], steps["/metadata/resourceVersion"]) == ("uid-1", "7")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"found": ""}, None),  # the pool has never had this RayCluster
        ({"found": "uid-0 1 1 0"}, None),  # but one of its name, which was deleted
        ({"found": "", **claimed(id="other/1")}, None),
        (claimed(id="other/1"), 'is used by another pool, perhaps of another store: "other"'),
        (claimed(decision=9), "has a newer decision of this pool"),
        ({"size": 1, "labels": {QUEUE: "nightly"}, **claimed()}, None),  # Kueue would end all pods
    ],
)
def test_what_is_not_proven_to_be_of_the_pool_is_not_changed(options, problem):
    plan = plan_of_down(**options)
    assert (plan.patch, plan.doomed) == (None, frozenset())
    assert plan.problem is None if problem is None else problem in plan.problem


def test_requests_to_ray_go_through_the_api_server_with_both_credentials(kube):
    kube.add("rayclusters", ray_cluster("c", authOptions={"mode": "token"}))
    endpoint = attach(kube).endpoint()
    assert endpoint.api == "http://c-head-svc.ml.svc:8265"
    assert endpoint.token() == RAY_TOKEN
    assert endpoint.token_path.stat().st_mode & 0o777 == 0o600
    client = JobClient.at(endpoint)
    assert client.get("/api/v0/cluster_metadata", lambda answer: answer["data"]["pythonVersion"]) == "3.11.9"
    kube.next_answers = [429]  # of the API server
    patient = JobClient(endpoint.api, RAY_TOKEN, access=endpoint.access, wait=0.0)
    assert patient.submit(["true"], "job-1", {}) is True
    secret = kube.objects["secrets", "c"]
    endpoint.token_path.write_text("old")  # the RayCluster was deleted and created again
    assert len(ComputePool("c").get_nodes()) == 1
    assert secret["data"] and ComputePool("c").endpoint().token() == RAY_TOKEN
    ComputePool("c").down()
    assert not endpoint.token_path.exists()


def test_a_token_goes_in_clear_only_to_this_machine_or_if_that_is_allowed_by_name(kube):
    without = {"max_nodes": 4, "api": "http://10.0.0.5:8265"}
    backend = KubeRayBackend()
    kube.add("rayclusters", ray_cluster("open"))
    backend.admit(PoolSpec.parse(kube.uri("open", **without)), 1)
    kube.add("rayclusters", ray_cluster("c", authOptions={"mode": "token"}))
    for fine in ("https://10.0.0.5", "http://127.0.0.1:8265", "http://10.0.0.5:8265&token_over_http=allow"):
        backend.admit(PoolSpec.parse(kube.uri("c", **without | {"api": fine})), 1)
    with pytest.raises(InvalidArgumentError, match=r"send its token to http://10.*https://.*token_over_http=allow"):
        backend.admit(PoolSpec.parse(kube.uri("c", **without)), 1)
    with pytest.raises(InvalidArgumentError, match="send its token"):  # shoal would create it with a token
        backend.admit(PoolSpec.parse(kube.uri("made", **without, image="node:1")), 1)


def uses(role):
    """What a Role allows, as the double of the API records it."""
    return {f"{verb} {kind}" for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}


def test_the_smallest_role_is_enough_and_none_of_its_rights_is_too_many(kube):
    kube.allowed = uses(roles()["shoal"])
    cluster = ray_cluster("retrain", authOptions={"mode": "token"})
    kube.add("rayclusters", cluster)
    pool = ComputePool(kube.uri("retrain", max_nodes=4)).up()
    kube.become = lambda pod: {"phase": "Pending", **container({"waiting": {"reason": "CrashLoopBackOff"}}, **CRASHED)}
    kube.log = "no memory"
    pool.scale(2, is_async=True)
    assert "the end of its log: no memory" in waits(pool)
    client = JobClient.at(pool.endpoint())
    client.upload("x.zip", b"")
    client.submit(["true"], "job-1", {})
    client.delete("job-1")
    pool.down()
    assert set(kube.requests) | {"watch pods", "watch rayclusters"} == kube.allowed


def test_a_cluster_that_was_deleted_is_lost_and_down_ends(kube):
    kube.add("rayclusters", ray_cluster("c"))
    pool = attach(kube)
    del kube.objects["rayclusters", "c"]
    assert lost(pool) == ["RayCluster ml/c does not exist", None]
    pool.down()
    assert node_rows() == []
