"""What a test of upgrading runs with the code of the version before, and with today's.

``python -m tests.support.previous_version start FOLDER`` brings a pool up, leases it, submits a job, and prints what it
has made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shoal.state.databases import SCHEMA_VERSION
from shoal.state.private_folders import runtime_root
from tests.support.waiting import wait_until

POOL = "upgraded"
HOLDER = "airflow:dag/run"


def document(folder: Path, **run_config: Any) -> dict[str, Any]:
    """A job that works until there is a file `go` in a folder."""
    return {
        "framework": "pytorch",
        "train_func": "tests.support.previous_version:work",
        "args": [str(folder)],
        "scaling_config": {"num_nodes": 1, "num_workers_per_node": 1},
        "run_config": {"pool_name": POOL, "artifact_location": str(folder / "artifacts"), **run_config},
        "tracking": None,
    }


def work(folder: str) -> str:
    """Say in `began` that it runs; returns the schema that its worker's code knows."""
    (Path(folder) / "began").touch()
    wait_until((Path(folder) / "go").exists, "the upgrade", seconds=240)
    return SCHEMA_VERSION


def start(folder: Path) -> dict[str, Any]:
    from shoal import ComputePool, jobs

    pool = ComputePool(f"local://{POOL}?max_nodes=2", holder=HOLDER).up()
    pool.lease(1)
    handle = jobs.submit(jobs.parse_spec(document(folder)), holder=HOLDER)
    return {"job_id": handle.job_id, "runtime_root": str(runtime_root())}


if __name__ == "__main__":
    json.dump({"start": start}[sys.argv[1]](Path(sys.argv[2])), sys.stdout)
