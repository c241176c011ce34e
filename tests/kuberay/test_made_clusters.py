"""RayClusters that shoal creates, on a real control plane: every guarantee with the Roles of the guide, and nothing is
left after `down`, after a killed process, and if no process of shoal ever comes back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.pool.api import ComputePool
from shoal.pool.reconciling import sweep
from shoal.state import Store
from tests.kuberay.conftest import Cluster
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane
from tests.kuberay.pools import Made, created
from tests.pool.backends.test_conformance import GUARANTEES
from tests.support.waiting import wait_until

client = pytest.importorskip("kubernetes.client")


@pytest.fixture
def kube(plane: ControlPlane, cluster: Cluster, no_reconciler: None, namespace: str, tmp_path: Path) -> Iterator[Made]:
    with cluster.client() as api, created(plane, api, namespace, tmp_path) as kube:
        yield kube


def test_a_created_cluster_keeps_every_guarantee_and_leaves_nothing(kube: Made):
    before = kube.everything()
    pool = ComputePool(kube.uri).up()
    assert {"rayclusters/conform", f"leases/{lease(kube)}"} <= kube.everything() - before
    for test in GUARANTEES:
        pool.scale(1)
        test(kube, pool)
    pool.down()
    wait_until(lambda: kube.everything() == before, "the end of all that was created", seconds=60)


def lease(kube: Made) -> str:
    """The name of the only Lease."""
    [found] = client.CoordinationV1Api(kube.core.api_client).list_namespaced_lease(kube.namespace).items
    return str(found.metadata.name)


SCALES = """
import sys
from shoal.pool import reconciling
from shoal.pool.api import ComputePool
reconciling.ensure_running = lambda: None  # a reconciler that lives creates the cluster again
pool = ComputePool(sys.argv[1]).up()
print("up", flush=True)
pool.scale(3)
"""


def killed_while_it_scales(kube: Made) -> None:
    """A process that is killed with SIGKILL while its pods start."""
    kube.plane.remove_image(LIGHT_IMAGE)
    child = subprocess.Popen([sys.executable, "-c", SCALES, kube.uri], stdout=subprocess.DEVNULL)
    wait_until(lambda: kube.pods(heads=True), "the pod of the head", seconds=60)
    child.kill()
    child.wait()


def test_a_sweep_after_a_killed_process_leaves_nothing(kube: Made):
    before = kube.everything()
    killed_while_it_scales(kube)
    kube.plane.add_light_image()
    ComputePool(kube.name).down()
    sweep(Store())
    wait_until(lambda: kube.everything() == before, "the end of all that was created", seconds=60)


def test_the_reaper_ends_what_nobody_has_renewed(kube: Made, tmp_path: Path):
    before = kube.everything()
    killed_while_it_scales(kube)
    coordination = client.CoordinationV1Api(kube.core.api_client)
    name = lease(kube)
    reap = [sys.executable, "-m", "shoal.pool.backends.kuberay.reaper", kube.namespace]
    reap += ["--kubeconfig", str(kube.plane.kubeconfig)]

    def change(*operations: dict[str, object]) -> None:
        coordination.patch_namespaced_lease(
            name, kube.namespace, list(operations), _content_type="application/json-patch+json"
        )

    # A host whose clock is hours behind has renewed it.
    change({"op": "replace", "path": "/spec/renewTime", "value": "2026-01-01T00:00:00.000000Z"})
    assert subprocess.run(reap, capture_output=True, text=True, check=True).stdout == ""
    change(
        {"op": "remove", "path": "/spec/renewTime"},
        {"op": "replace", "path": "/spec/leaseDurationSeconds", "value": 1},
    )

    def reaped() -> bool:
        said = subprocess.run(reap, capture_output=True, text=True, check=True).stdout
        return f"deleted Lease {kube.namespace}/{name}" in said

    wait_until(reaped, "the end of the Lease", seconds=60)
    wait_until(lambda: kube.everything() == before, "the end of all that was created", seconds=60)
    kube.plane.add_light_image()
    ComputePool(kube.name).down()
