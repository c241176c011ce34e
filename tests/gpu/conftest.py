"""Fixtures of tests that need a GPU: a process without a pool, which gets an embedded one with all GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.pool.backends.local.gpus import Gpu, visible_gpus


@pytest.fixture(scope="session")
def gpus() -> list[Gpu]:
    """The GPUs that this process may use."""
    found = visible_gpus(os.environ)
    if not found:
        pytest.skip("this machine has no GPU that this process can use (nvidia-smi shows those of NVIDIA)")
    return found


@pytest.fixture
def alone(gpus: list[Gpu], fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """A process that is connected to no Ray cluster and knows no pool; the machine's GPUs."""
    monkeypatch.setattr("shoal.distributors.call.is_connected", lambda: False)
    return gpus
