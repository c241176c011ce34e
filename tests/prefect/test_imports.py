"""Importing the collection loads nothing heavy beyond what a Prefect flow's own first line loads."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from tests.test_imports import HEAVY


@pytest.mark.processes
def test_nothing_heavy_is_added():
    """In one process: what Prefect itself has imported is there before."""
    loaded = f"print([name for name in {HEAVY} if name in sys.modules])"
    check = f"import sys; from prefect import flow, task; {loaded}; import shoal.prefect; {loaded}"
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    before, after = ran.stdout.splitlines()
    assert after == before


def test_prefect_finds_the_collection():
    found = {entry.name: entry.value for entry in entry_points(group="prefect.collections")}
    assert found["shoal"] == "shoal.prefect"


def test_every_task_has_its_twin():
    import shoal.prefect
    from shoal.prefect import retry_unless_permanent

    jobs = ("distributed_train", "batch_predict", "tune")
    for name in ("scale_cluster", "get_nodes", "wait_for_nodes", *jobs, "cleanup_pool"):
        task, twin = getattr(shoal.prefect, name), getattr(shoal.prefect, f"a{name}")
        assert not task.isasync and twin.isasync
        assert task.fn.__annotations__ == twin.fn.__annotations__
        assert task.retry_condition_fn is twin.retry_condition_fn is retry_unless_permanent
