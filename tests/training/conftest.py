"""Fixture: one driver for all modules of this package: a module that connects anew also starts its workers anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.training.gang.gang import end_gangs
from tests.support.two_node_cluster import TwoNodes, connected
from tests.support.without_ray import nodes_without_ray


@pytest.fixture(scope="package")
def driver(two_nodes: TwoNodes) -> Iterator[TwoNodes]:
    """This process as a driver of the two nodes; for this package, so that no other's tests find it connected."""
    with connected(two_nodes):
        yield two_nodes


@pytest.fixture(scope="module")
def without_ray() -> Iterator[None]:
    """This process as a driver that starts its workers itself; for a module, whose tests share the workers."""
    with nodes_without_ray(2):
        yield
        end_gangs()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that fork this process first: a process that is connected to Ray cannot be forked safely."""
    items.sort(key=lambda item: item.path.name != "test_child_processes.py")
