"""Fixtures: one driver for all modules of this package, and a store with a pool whose head is an HTTP server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.job_store import head, store
from tests.support.two_node_cluster import TwoNodes, connected

__all__ = ["driver", "head", "store"]


@pytest.fixture(scope="package")
def driver(two_nodes: TwoNodes) -> Iterator[TwoNodes]:
    """This process as a driver of the two nodes. Tests of calls from a process that is not connected use `outside`."""
    with connected(two_nodes):
        yield two_nodes


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the session may have connected this process to a Ray cluster of their own."""
    monkeypatch.setattr("shoal.distributors.call.is_connected", lambda: False)
