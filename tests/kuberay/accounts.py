"""A service account with few rights, and its kubeconfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.support import ROOT

FILES = ROOT / "docker" / "kubernetes"


def smallest_role(namespace: str, secret: str, *, creates: bool = False) -> dict[str, Any]:
    """The Role `shoal`, for another namespace and the Secret of another RayCluster, and with the rules of
    `shoal-create` if shoal `creates` RayClusters."""
    made = roles()
    role = made["shoal"]
    role["metadata"]["namespace"] = namespace
    if creates:
        role["rules"] += made["shoal-create"]["rules"]
    for rule in role["rules"]:
        if "resourceNames" in rule:
            rule["resourceNames"] = [secret]
    return role


def roles() -> dict[str, dict[str, Any]]:
    """The Roles of `shoal.yaml`, by name."""
    found = [made for made in yaml.safe_load_all((FILES / "shoal.yaml").read_text()) if made["kind"] == "Role"]
    return {role["metadata"]["name"]: role for role in found}


def make_account(client: Any, namespace: str, role: dict[str, Any], folder: Path) -> Path:
    """Make a service account with the rights of a Role, and return its kubeconfig."""
    from kubernetes.client import CoreV1Api, RbacAuthorizationV1Api

    core, rbac = CoreV1Api(client), RbacAuthorizationV1Api(client)
    core.create_namespaced_service_account(namespace, {"metadata": {"name": "shoal"}})
    rbac.create_namespaced_role(namespace, role)
    rbac.create_namespaced_role_binding(
        namespace,
        {
            "metadata": {"name": "shoal"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": "shoal", "namespace": namespace}],
        },
    )
    answer = core.create_namespaced_service_account_token("shoal", namespace, {"spec": {"expirationSeconds": 3600}})
    given = client.configuration
    cluster = {"server": given.host, "certificate-authority": str(Path(given.ssl_ca_cert).absolute())}
    # The client keeps certificates that stand in a kubeconfig in a file that ends with this process.
    path = folder / "account.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "account",
                "contexts": [
                    {"name": "account", "context": {"cluster": "tests", "user": "shoal", "namespace": namespace}}
                ],
                "clusters": [{"name": "tests", "cluster": cluster}],
                "users": [{"name": "shoal", "user": {"token": answer.status.token}}],
            }
        )
    )
    return path
