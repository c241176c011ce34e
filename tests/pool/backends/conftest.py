from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.pool.api import ComputePool, list_pools
from shoal.pool.backends.ray.backend import Cluster
from shoal.pool.spec import PoolSpec
from tests.pool.backends.foreign import ForeignCluster
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.pool_processes import nothing_left
from tests.support.waiting import wait_until


@pytest.fixture(scope="package")
def static_cluster() -> Iterator[ForeignCluster]:
    """A static cluster of two nodes; a test that loses one has to put it back.

    As `ray start --head` makes it: its monitor reports that there is no autoscaler, and no Ray job has to look for one.
    """
    with ForeignCluster("watched", workers=1) as cluster:
        seen = Cluster(PoolSpec.parse(cluster.uri()))
        wait_until(lambda: seen.autoscaling() is False, "the monitor's first report")
        yield cluster


@pytest.fixture
def kube(fresh_home, monkeypatch, tmp_path) -> Iterator[FakeKubernetes]:
    """A Kubernetes API; no detached reconciler, so whoever acts or sweeps does it all; and each look sends requests,
    because nothing is watched."""
    pytest.importorskip("kubernetes", reason="the extra kuberay is not installed")
    monkeypatch.setattr("shoal.pool.backends.kuberay.watch.PERIOD", 0.0)
    monkeypatch.setattr("shoal.pool.backends.kuberay.watch.PoolView._watch", lambda view: None)
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    kube = FakeKubernetes(tmp_path)
    yield kube
    kube.close()


@pytest.fixture
def alone(fresh_home, monkeypatch) -> Iterator[None]:
    """No detached reconciler: whoever acts or sweeps does it all; and nothing of any pool is left at the end.

    The nodes of a cluster are not checked when a pool comes up, which takes seconds.
    """
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    monkeypatch.setattr("shoal.pool.backends.preflight.preflight", lambda *_: [])
    yield
    for status in list_pools():
        ComputePool(status.name).down()
    nothing_left()
