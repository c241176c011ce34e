"""Fixtures of the command's tests: the command in this process, and as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app
from shoal.os_processes import ProcessId, host_id, hostname
from shoal.pool import bound_host
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Job, JobState, Pool, PoolState

Invoke = Callable[..., Result]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

SHOAL = [sys.executable, "-c", "from shoal.cli import main; main()"]
"""The console script, wherever it was installed to."""


def document(text: str) -> Any:
    """The one JSON document in an output; NaN and Infinity are no JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def shoal(fresh_home: Path) -> Invoke:
    """Run the command in this process, on a store of its own."""

    def invoke(*args: str, **extra: Any) -> Result:
        return CliRunner().invoke(app, list(args), **extra)

    return invoke


@pytest.fixture
def shoal_process(fresh_home: Path) -> Run:
    """Run the command as a process, as a script would."""

    def run(*args: str, **extra: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*SHOAL, *args], capture_output=True, text=True, check=False, **extra)

    return run


@pytest.fixture
def a_pool(fresh_home: Path) -> str:
    """A pool that is down."""
    spec = PoolSpec(name="retrain", max_nodes=3)
    bound_host.record(spec)
    with Store().transaction() as session:
        session.add(
            Pool(
                name=spec.name,
                spec=spec.model_dump(mode="json"),
                state=PoolState.DOWN,
                host=hostname(),
                host_id=host_id(),
                min_nodes=spec.min_nodes,
                max_nodes=spec.max_nodes,
                epoch=1,
                next_node=0,
                created_at=0.0,
                touched_at=0.0,
            )
        )
    return spec.name


@pytest.fixture
def some_jobs(fresh_home: Path) -> list[str]:
    """Three jobs of a pool that is gone: one with a result, one that failed, one that never came to run."""
    result = {
        "job_id": "good",
        "attempt": 1,
        "model_path": "/models/good",
        "model_digest": "0" * 64,
        "model_uri": "models:/flights/1",
        "metrics": {"eval-rmse": 1.25, "eval-nan": "NaN"},
        "best_iteration": 7,
        "rows": 1000,
        "num_workers": 2,
        "seconds": 3.5,
        "restarts": 0,
        "peak_memory_per_worker": [1, 2],
        "mlflow_run_id": None,
        "model_version": "1",
        "promoted": True,
        "champion": None,
    }
    shared: dict[str, Any] = {
        "attempt": 1,
        "pool": "gone",
        "holder": "cli:me@here",
        "spec": {"dataset": {"paths": ["/data"]}, "input_cols": ["a"], "label_col": "y"},
        "endpoint": {},
        "submitter": ProcessId.mine().to_json(),
        "last_polled_at": 1.0,
        "created_at": 1.0,
    }
    with Store().transaction() as session:
        session.add(
            Job(
                id="good",
                state=JobState.SUCCEEDED,
                result=result,
                progress={"done": 8, "total": 10, "unit": "rounds", "metrics": {"eval-rmse": 1.25, "eval-nan": nan}},
                **shared | {"started_at": 2.0, "ended_at": 9.0},
            )
        )
        session.add(Job(id="bad", state=JobState.FAILED, error="rank 1 met a null label", **shared))
        session.add(Job(id="waiting", state=JobState.PENDING, **shared))
    return ["good", "bad", "waiting"]
