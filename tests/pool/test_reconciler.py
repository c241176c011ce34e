"""The detached reconciler: one a home, and back when it was killed, though nobody asks for anything."""

from __future__ import annotations

import psutil
import pytest

from shoal.state import home
from tests.waiting import wait_until

pytestmark = pytest.mark.ray


def reconcilers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if "shoal.pool.reconciler" in (process.info["cmdline"] or ()) and process.environ()["SHOAL_HOME"] == str(
                home()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_killed_one_is_replaced_by_any_nodes_supervisor(real_pool):
    (one,) = wait_until(reconcilers, "the reconciler")
    one.kill()
    one.wait()
    assert wait_until(reconcilers, "another one")[0].pid != one.pid
