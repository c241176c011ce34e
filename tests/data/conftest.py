"""Fixtures of the data tests: real Parquet files in temporary directories, one real local Ray for the whole session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Before Ray is imported: without these it may listen beyond loopback and report home.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

Write = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ray: starts a real local Ray (slow)")


@pytest.fixture(autouse=True)
def shoal_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SHOAL_HOME of the test's own."""
    home = tmp_path_factory.mktemp("shoal-home")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    return home


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes columns as a Parquet file under tmp_path and returns its path."""

    def write(name: str, row_group_size: int | None = None, **columns: object) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
        return path

    return write


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this test session's own; never one that happens to run here."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
