"""Homes of shoal for tests, and the stores that they are run on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.distributors import call_pool
from tests.support import session_leftovers

STORES = ["sqlite", "postgresql"]


def end_embedded_pools() -> None:
    """End the embedded pools of this process, and wait until all their processes are gone."""
    with call_pool._lock:
        pools = list(call_pool._kept.values())
        call_pool._kept.clear()
    for each in pools:
        call_pool._end(each)


@contextmanager
def new_home() -> Iterator[Path]:
    """A home for the duration."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    session_leftovers.add_home(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(folder))
        yield folder
        # The pools of calls without a pool are in this home's store, and would outlive it.
        end_embedded_pools()
    session_leftovers.remove_home(folder)
