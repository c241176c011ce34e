"""Fixtures: one control plane for the session, or somebody else's cluster, and a namespace for each test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kuberay.control_plane import RAY_IMAGE, ControlPlane, control_plane, missing
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

    from shoal import ComputePool
    from tests.kuberay.pools import Kubernetes

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that need a cluster out of `make test`, and give them time on a busy machine."""
    for item in items:
        if item.path.is_relative_to(HERE) and {"cluster", "plane"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.kuberay)
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(1200))


@dataclass(frozen=True)
class Cluster:
    """A cluster with the KubeRay operator, and the image of its Ray nodes."""

    kubeconfig: Path
    image: str

    def client(self) -> ApiClient:
        """A new client of the API, as the kubeconfig's user."""
        from kubernetes.config import new_client_from_config

        return new_client_from_config(str(self.kubeconfig))


@pytest.fixture(scope="session")
def plane(session_home: Path) -> Iterator[ControlPlane]:
    """The control plane on this machine: its processes and nodes can be stopped."""
    if os.environ.get("SHOAL_TEST_KUBECONFIG"):
        pytest.skip("the test stops processes of a cluster: it needs a control plane of its own")
    if reason := missing():
        pytest.skip(reason)
    with control_plane(nodes=2) as made:
        yield made


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster of $SHOAL_TEST_KUBECONFIG, or a control plane on this machine."""
    pytest.importorskip(
        "kubernetes", reason="the client of Kubernetes is not installed: `pip install 'shoal[kuberay]'`"
    )
    if given := os.environ.get("SHOAL_TEST_KUBECONFIG"):
        return Cluster(Path(given), os.environ.get("SHOAL_TEST_IMAGE", "rayproject/ray:2.60.0-py311"))
    plane: ControlPlane = request.getfixturevalue("plane")
    return Cluster(plane.kubeconfig, RAY_IMAGE)


@pytest.fixture
def no_reconciler(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No detached reconciler: whoever acts or sweeps does it all; and no check of nodes, because the stand-in for Ray
    has no jobs."""
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    monkeypatch.setattr("shoal.pool.backends.preflight.preflight", lambda *_: [])


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own; it and all that is in it are gone afterwards."""
    from kubernetes.client import ApiException, CoreV1Api

    name = f"shoal-test-{secrets.token_hex(3)}"
    with cluster.client() as client:
        core = CoreV1Api(client)
        core.create_namespace({"metadata": {"name": name}})

        def has_account() -> bool:
            return any(each.metadata.name == "default" for each in core.list_namespaced_service_account(name).items)

        wait_until(has_account, "the service account of the namespace")
        yield name
        core.delete_namespace(name)

        def gone() -> bool:
            try:
                core.read_namespace(name)
            except ApiException as error:
                return bool(error.status == 404)
            return False

        wait_until(gone, f"the end of the namespace {name}", seconds=120, every=0.5)


@pytest.fixture
def kube(
    plane: ControlPlane, cluster: Cluster, no_reconciler: None, namespace: str, tmp_path: Path
) -> Iterator[Kubernetes]:
    """A RayCluster that exists, and the right to scale it."""
    from tests.kuberay.pools import existing

    with cluster.client() as api, existing(plane, api, namespace, tmp_path) as kube:
        yield kube


@pytest.fixture
def pool(kube: Kubernetes) -> ComputePool:
    """A pool on this RayCluster, up."""
    from shoal import ComputePool

    return ComputePool(kube.uri).up()
