"""Fixtures: pools of tiny nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from shoal.pool.api import ComputePool, list_pools
from shoal.pool.backends.interface import NodeRef, PoolRef
from shoal.pool.backends.local.backend import log_path, node_environment
from shoal.pool.holder import ALL_TEAMS
from shoal.pool.options.local import LocalOptions
from tests.support import ROOT, fork_server
from tests.support.homes import STORES, end_embedded_pools
from tests.support.pool_processes import nothing_left
from tests.support.tiny_backend import TinyBackend


class ForkingTinyBackend(TinyBackend):
    """The backend of tiny nodes whose supervisors are forked."""

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        for node in nodes:
            fork_server.spawn(
                [node.id, str(node.epoch)], env=node_environment(node), log=log_path(node.pool, node.name)
            )


@pytest.fixture(scope="session")
def forked_supervisors() -> Iterator[str]:
    """The address of the session's server that forks the supervisors of tiny nodes."""
    with fork_server.running() as address:
        yield address


@pytest.fixture
def tiny(fresh_home, forked_supervisors, monkeypatch):
    """Pools of tiny nodes, without the detached reconciler: whoever acts or sweeps does it all."""
    monkeypatch.setattr(LocalOptions, "backend_class", f"{__name__}:ForkingTinyBackend")
    monkeypatch.setattr("shoal.pool.reconciling.ensure_running", lambda: None)
    monkeypatch.setattr("shoal.pool.scaling_plan.SPAWN_GRACE", 2.0)  # a tiny supervisor claims its row within a second
    monkeypatch.setenv(fork_server.ADDRESS, forked_supervisors)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    yield fresh_home

    end_embedded_pools()
    for status in list_pools():
        ComputePool(status.name, team=ALL_TEAMS).down()
    nothing_left()


@pytest.fixture(params=STORES)
def either_tiny(request):
    """Pools of tiny nodes, once on SQLite and once on PostgreSQL."""
    if request.param == "postgresql":
        request.getfixturevalue("on_postgresql")
    return request.getfixturevalue("tiny")
