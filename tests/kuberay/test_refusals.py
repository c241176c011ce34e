"""What users read when Kubernetes refuses, reverts or holds a change of a pool, on a real control plane.

Ray is the stand-in `light_ray.py`; the API server, its admission and the operator are real.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.api import ComputePool
from shoal.pool.backends.kuberay.backend import KubeRayBackend
from shoal.pool.reconciling import reconcile
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from tests.kuberay.accounts import FILES
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane
from tests.kuberay.pools import Kubernetes, Made, created
from tests.support.pool_processes import node_rows
from tests.support.waiting import wait_until

client = pytest.importorskip("kubernetes.client")

GROUP = "/spec/workerGroupSpecs/0"
POLICIES = "/apis/admissionregistration.k8s.io/v1/"


def wait_for_reason(pool: ComputePool, said: str) -> None:
    def described() -> bool:
        reconcile(Store(), pool.name)
        return bool(re.search(said, pool.describe().reason or ""))

    try:
        wait_until(described, f"the reason {said!r}", seconds=60, every=0.2)
    except AssertionError as error:
        raise AssertionError(pool.describe().reason) from error


@pytest.mark.parametrize(
    ("resource", "verb"),
    [("rayclusters", "patch"), ("pods", "list"), ("secrets", "get"), ("services/proxy", "create")],
)
def test_a_right_that_is_missing_is_named_before_anything_starts(kube: Kubernetes, resource: str, verb: str):
    rbac = client.RbacAuthorizationV1Api(kube.core.api_client)
    role = rbac.read_namespaced_role("shoal", kube.namespace)
    for rule in role.rules:
        if resource in rule.resources:
            rule.verbs.remove(verb)
    role.rules = [rule for rule in role.rules if rule.verbs]
    rbac.replace_namespaced_role("shoal", kube.namespace, role)

    backend, spec = KubeRayBackend(), PoolSpec.parse(kube.uri)

    def refused() -> bool:
        try:
            backend.admit(spec, 1)
        except PoolUnreachableError:
            return True
        return False  # the API server has not seen the new Role yet

    wait_until(refused, "the end of the right", seconds=30, every=0.1)
    with pytest.raises(PoolUnreachableError, match=rf"does not allow to {verb} {resource} .*Apply the Role"):
        ComputePool(kube.uri).up()
    assert node_rows() == []


def test_a_wrong_api_is_named_before_anything_starts(kube: Kubernetes):
    def is_ready() -> bool:
        found = kube.core.list_namespaced_pod(kube.namespace, label_selector="ray.io/node-type=head").items
        return any(
            each.type == "Ready" and each.status == "True" for pod in found for each in pod.status.conditions or ()
        )

    wait_until(is_ready, "a head that is ready", seconds=60)
    with pytest.raises(PoolUnreachableError, match=r"at http://127.0.0.1:1, as api= in the URI.* does not answer"):
        ComputePool(f"{kube.uri}&api=http://127.0.0.1:1").up()
    assert node_rows() == []


def refuse(kube: Kubernetes, name: str, rule: dict[str, Any]) -> None:
    """Let the API server refuse changes of RayClusters in the namespace."""
    resource = {"apiGroups": ["ray.io"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["rayclusters"]}
    spec = {"matchConstraints": {"resourceRules": [resource]}, "validations": [rule], "failurePolicy": "Fail"}
    apply(kube.plane, {"kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": spec})
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": kube.namespace}}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": here}
    apply(kube.plane, {"kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": binding})


def apply(plane: ControlPlane, made: dict[str, Any]) -> None:
    plural = {"ValidatingAdmissionPolicy": "policies"}.get(made["kind"], "policybindings")
    made = {"apiVersion": "admissionregistration.k8s.io/v1", **made}
    path = f"{POLICIES}validatingadmission{plural}/{made['metadata']['name']}?fieldManager=tests&fieldValidation=Strict"
    plane.request("PATCH", path, json.dumps(made).encode(), "application/apply-patch+yaml")


@pytest.fixture
def policy(plane: ControlPlane) -> Iterator[str]:
    """A name for policies that are removed at the end."""
    name = f"tests-{secrets.token_hex(3)}"
    yield name
    for plural in ("policies", "policybindings"):
        for made in plane.request("GET", f"{POLICIES}validatingadmission{plural}")["items"]:
            if made["metadata"]["name"].startswith(name):
                plane.request("DELETE", f"{POLICIES}validatingadmission{plural}/{made['metadata']['name']}")


@pytest.mark.parametrize("reason", ["Invalid", "Forbidden"])
def test_the_text_of_a_policy_that_refuses_a_size_is_the_reason(kube: Kubernetes, policy: str, reason: str):
    pool = ComputePool(kube.uri).up()
    text = {"message": "no size without a ticket", "reason": reason}
    refuse(kube, policy, {"expression": "object.spec.workerGroupSpecs[0].replicas == 0", **text})
    wait_until(lambda: is_refused(kube, 2), "the policy", seconds=30, every=0.1)
    pool.scale(2, is_async=True)
    wait_for_reason(pool, f"{policy}.* denied request: no size without a ticket$")


def is_refused(kube: Kubernetes, replicas: int) -> bool:
    """Whether a change of the size is refused now, with a dry run."""
    change = [{"op": "replace", "path": f"{GROUP}/replicas", "value": replicas}]
    try:
        kube.custom.patch_namespaced_custom_object(
            "ray.io", "v1", kube.namespace, "rayclusters", kube.name, change, dry_run="All",
            _content_type="application/json-patch+json",
        )  # fmt: skip
    except client.ApiException:
        return True
    return False


def test_gitops_that_reverts_a_size_is_named(kube: Kubernetes, pool: ComputePool):
    kube.plane.remove_image(LIGHT_IMAGE)
    pool.scale(2, is_async=True)
    reconcile(Store(), pool.name)
    wait_until(kube.pods, "the pod of the worker", seconds=60)
    kube.custom.patch_namespaced_custom_object(
        "ray.io", "v1", kube.namespace, "rayclusters", kube.name,
        [{"op": "replace", "path": f"{GROUP}/replicas", "value": 0}],
        field_manager="argocd-controller", _content_type="application/json-patch+json",
    )  # fmt: skip
    wait_until(lambda: kube.pods() == [], "the end of the worker", seconds=60)
    reconcile(Store(), pool.name)
    assert "was set back to 0 replicas by argocd-controller" in (pool.describe().reason or "")


def test_a_finalizer_that_holds_a_pod_is_named(kube: Kubernetes, pool: ComputePool):
    pool.scale(2)
    [name] = kube.pods()
    kube.core.patch_namespaced_pod(name, kube.namespace, {"metadata": {"finalizers": ["example.com/audit"]}})
    try:
        pool.scale(1, is_async=True)

        def named() -> bool:
            reconcile(Store(), pool.name)
            return any("finalizer example.com/audit holds it" in (node.error or "") for node in pool.describe().leaving)

        wait_until(named, "the finalizer's name", seconds=60, every=0.2)
    finally:
        kube.core.patch_namespaced_pod(name, kube.namespace, {"metadata": {"finalizers": None}})


def test_a_reason_is_found_behind_600_other_warnings(kube: Kubernetes, pool: ComputePool):
    made = {"apiVersion": "v1", "kind": "Pod", "namespace": kube.namespace}
    for number in range(600):
        kube.core.create_namespaced_event(
            kube.namespace,
            {
                "metadata": {"name": f"a-{number}"}, "type": "Warning", "reason": "Other", "message": "other",
                "involvedObject": made | {"name": f"a-{number}", "uid": str(number)},
                "lastTimestamp": "2099-01-01T00:00:00Z",
            },
        )  # fmt: skip
    kube.change({"op": "add", "path": "/spec/rayVersion", "value": "2.50.0"})
    pool.scale(2, is_async=True)
    wait_for_reason(pool, "is invalid: InvalidRayClusterSpec")


@pytest.fixture
def by_file(kube: Kubernetes) -> Path:
    """Let the kubeconfig name the file with its token."""
    config = json.loads(kube.kubeconfig.read_text())
    path = kube.kubeconfig.with_name("token")
    path.write_text(config["users"][0]["user"].pop("token"))
    config["users"][0]["user"]["tokenFile"] = str(path)
    kube.kubeconfig.write_text(json.dumps(config))
    return path


def test_a_token_file_is_read_again_when_the_token_has_ended(kube: Kubernetes, by_file: Path):
    token = by_file.read_text()
    by_file.write_text("ended")
    with pytest.raises(PoolUnreachableError, match="does not accept the credentials"):
        ComputePool(kube.uri).up()
    by_file.write_text(token)
    assert len(ComputePool(kube.uri).up().get_nodes()) == 1


@pytest.fixture
def made(plane: ControlPlane, cluster: Cluster, no_reconciler: None, namespace: str, tmp_path: Path) -> Iterator[Made]:
    with cluster.client() as api, created(plane, api, namespace, tmp_path) as kube:
        yield kube


def shipped(kube: Kubernetes, name: str) -> list[dict[str, Any]]:
    """The objects of policies.yaml, for the namespace and the image of the test."""
    text = (FILES / "policies.yaml").read_text()
    text = text.replace("registry.example/shoal-node:0.1.0", LIGHT_IMAGE).replace("shoal-rayclusters", name)
    text = text.replace("system:serviceaccount:ml:", f"system:serviceaccount:{kube.namespace}:")
    text = text.replace("kubernetes.io/metadata.name: ml", f"kubernetes.io/metadata.name: {kube.namespace}")
    return list(yaml.safe_load_all(text))


def test_with_the_policies_pools_work_and_templates_are_refused(made: Made, policy: str):
    from kubernetes.config import new_client_from_config

    for each in shipped(made, policy):
        apply(made.plane, each)
    wait_until(lambda: not admitted(made.uri.replace(LIGHT_IMAGE, "other")), "the policy", seconds=30, every=0.2)
    pool = ComputePool(made.uri).up()
    pool.scale(2)
    pool.scale(1)
    with new_client_from_config(str(made.kubeconfig)) as api:
        custom, where = client.CustomObjectsApi(api), ("ray.io", "v1", made.namespace, "rayclusters")
        cluster = custom.get_namespaced_custom_object(*where, made.name)
        template = f"{GROUP}/template/spec"
        for path, value in {
            f"{template}/serviceAccountName": "other",
            f"{template}/volumes": [{"name": "x", "secret": {"secretName": "x"}}],
            f"{GROUP}/maxReplicas": 5,
            "/spec/headGroupSpec/template/spec/hostPID": True,
            "/spec/suspend": True,
        }.items():
            with pytest.raises(client.ApiException, match="only replicas, minReplicas and scaleStrategy"):
                custom.patch_namespaced_custom_object(
                    *where, made.name, [{"op": "add", "path": path, "value": value}],
                    _content_type="application/json-patch+json",
                )  # fmt: skip
        for change, said in FORBIDDEN:
            change(other := _other(cluster))
            with pytest.raises(client.ApiException, match=said):
                custom.create_namespaced_custom_object(*where, other, dry_run="All")
        custom.create_namespaced_custom_object(*where, _other(cluster), dry_run="All")
    pool.down()


def _other(cluster: dict[str, Any]) -> dict[str, Any]:
    copied = json.loads(json.dumps(cluster))
    return {**copied, "metadata": {"name": "other"}, "status": None}


def _pod(cluster: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    return found


def _container(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda cluster: _pod(cluster)["containers"][0].update(fields)


def _in_pod(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda cluster: _pod(cluster).update(fields)


FORBIDDEN: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_container(image="other"), "images"),
    (_in_pod(initContainers=[{"name": "i", "image": "other"}]), "images"),
    (_in_pod(serviceAccountName="other"), "service accounts"),
    (_container(envFrom=[{"secretRef": {"name": "other"}}]), "Secrets"),
    (_container(env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "other", "key": "x"}}}]), "Secrets"),
    (_in_pod(volumes=[{"name": "x", "secret": {"secretName": "other"}}]), "volumes"),
    (_in_pod(volumes=[{"name": "x", "hostPath": {"path": "/"}}]), "volumes"),
    (_in_pod(imagePullSecrets=[{"name": "other"}]), "Secrets"),
    (lambda cluster: cluster["spec"]["authOptions"].update(secretName="other"), "Secrets"),
    (lambda cluster: cluster["spec"].update(autoscalerOptions={"image": "other"}), "autoscalerOptions"),
]


def admitted(uri: str) -> bool:
    """Whether a pool may come up."""
    try:
        KubeRayBackend().admit(PoolSpec.parse(uri), 1)
    except InvalidArgumentError:
        return False
    return True


def test_the_reaper_is_admitted_to_restricted_namespaces(kube: Kubernetes):
    [job] = [each for each in yaml.safe_load_all((FILES / "shoal.yaml").read_text()) if each["kind"] == "CronJob"]
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.core.patch_namespace(kube.namespace, {"metadata": {"labels": labels}})
    pod = {"metadata": {"name": "reaper"}, "spec": job["spec"]["jobTemplate"]["spec"]["template"]["spec"]}
    kube.core.create_namespaced_service_account(kube.namespace, {"metadata": {"name": "shoal-reaper"}})
    kube.core.create_namespaced_pod(kube.namespace, pod, dry_run="All")
