from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.pool.api import ComputePool, list_pools
from tests.pool.backends.foreign import ForeignCluster
from tests.support.pool_processes import nothing_left


@pytest.fixture(scope="package")
def static_cluster() -> Iterator[ForeignCluster]:
    """A static cluster of two nodes; a test that loses one has to put it back."""
    with ForeignCluster("static", workers=1) as cluster:
        yield cluster


@pytest.fixture
def alone(fresh_home, monkeypatch) -> Iterator[None]:
    """No detached reconciler: whoever acts or sweeps does it all; and nothing of any pool is left at the end."""
    monkeypatch.setattr("shoal.pool.api.ensure_running", lambda: None)
    yield
    for status in list_pools():
        ComputePool(status.name).down()
    nothing_left()
