"""The program of the stack, which is not part of the package."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.guides import ROOT


@pytest.fixture(scope="session")
def stack():
    """The module `docker/stack.py`."""
    spec = importlib.util.spec_from_file_location("stack", ROOT / "docker" / "stack.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
