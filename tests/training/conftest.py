"""Fixture: one driver for all modules of this package: a module that connects anew also starts its workers anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.two_node_cluster import TwoNodes, connected


@pytest.fixture(scope="package")
def driver(two_nodes: TwoNodes) -> Iterator[TwoNodes]:
    """This process as a driver of the two nodes; for this package, so that no other's tests find it connected."""
    with connected(two_nodes):
        yield two_nodes
