"""An orchestrator on a host like macOS: /proc is hidden, and what only Linux has is removed from Python's modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from tests.support import ROOT

HIDE = 'mount -t proc proc /mnt && mount -t tmpfs none /proc && exec "$@"'

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(
        not shutil.which("unshare")
        or subprocess.run(["unshare", "--mount", "sh", "-c", HIDE, "sh", "true"], check=False).returncode != 0,
        reason="this user may not make a namespace of mounts, in which /proc is hidden",
    ),
]

# psutil needs no /proc on macOS. Here it reads the one at /mnt.
LIKE_MACOS = """
import fcntl, os, select, signal, socket
import psutil

psutil.PROCFS_PATH = "/mnt"
del os.O_PATH, os.O_TMPFILE, os.copy_file_range, os.eventfd, os.memfd_create, os.pidfd_open, os.posix_fadvise
del os.posix_fallocate, os.sched_getaffinity, os.sched_setaffinity, os.splice
del fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK, select.epoll, signal.pidfd_send_signal, signal.sigtimedwait
del socket.SO_PEERCRED
"""

ORCHESTRATOR = """
import shoal.airflow.hooks, shoal.airflow.operators, shoal.airflow.sensors, shoal.airflow.triggers, shoal.prefect
from shoal import ComputePool
from shoal.cli import main
from shoal.data import DataConnector
from shoal.distributors.xgboost import XGBEstimator
from shoal.errors import ShoalError
from shoal.os_processes import ProcessId
from shoal.pool.api import list_pools

assert ProcessId.mine().alive() and ProcessId.of(2**22 + 1) is None
for start in (
    lambda: ComputePool("ray://far?address=http://127.0.0.1:9").up(),
    lambda: ComputePool("local://near").up(),
    lambda: XGBEstimator().fit(DataConnector.from_parquet(ROWS), ["x0"], "y"),
):
    try:
        start()
    except ShoalError as error:
        print(f"{type(error).__name__}: {error}")
print([pool.name for pool in list_pools()])
import sys; sys.argv = ["shoal", "doctor"]; main()
"""


def test_only_pools_of_this_host_are_refused(fresh_home, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LIKE_MACOS)
    folders = os.pathsep.join([str(tmp_path), str(ROOT / "providers"), os.environ.get("PYTHONPATH", "")])

    rows = tmp_path / "rows.parquet"
    pd.DataFrame({"x0": [0.0, 1.0, 2.0], "y": [0.0, 1.0, 2.0]}).to_parquet(rows)
    program = f"ROWS = {str(rows)!r}\n{ORCHESTRATOR}"
    hidden = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HIDE, "sh", sys.executable, "-c", program]
    ran = subprocess.run(hidden, env={**os.environ, "PYTHONPATH": folders}, capture_output=True, text=True, check=False)
    assert "Traceback" not in ran.stderr, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if "Error: " in line or line.startswith("[")]
    assert len(lines) == 4, ran.stdout
    assert lines[0].startswith("ConnectionRefusedByClusterError: no Ray cluster answers")
    for line in lines[1:3]:
        assert line.startswith("InvalidArgumentError: local:// pools and embedded pools need Linux")
        assert line.endswith("use a ray:// pool")
    assert lines[3] == "[]"
    assert "local pools need Linux" in ran.stdout
