from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.pool.api import ComputePool, list_pools
from shoal.pool.backends import BACKENDS, LocalBackend
from tests.conftest import STORES
from tests.pool.looking import nothing_left

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(fresh_home, monkeypatch):
    """Pools of tiny nodes, without the detached reconciler: whoever acts or sweeps does it all."""
    monkeypatch.setitem(BACKENDS, "local", lambda: LocalBackend("tests.pool.tiny"))
    monkeypatch.setattr("shoal.pool.api.ensure_running", lambda: None)
    monkeypatch.setattr("shoal.pool.plan.SPAWN_GRACE", 2.0)  # a tiny supervisor claims its row within a second
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    yield fresh_home

    for status in list_pools():
        ComputePool(status.name).down()
    nothing_left()


@pytest.fixture(params=STORES)
def either_tiny(request):
    """Pools of tiny nodes, once on SQLite and once on PostgreSQL."""
    if request.param == "postgresql":
        request.getfixturevalue("on_postgresql")
    return request.getfixturevalue("tiny")
