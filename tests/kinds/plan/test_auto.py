"""The size "auto": a job on the pool's head plans it for a training, and the pool gets as many nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import shoal
from shoal import ComputePool, jobs
from shoal.errors import DataError, InvalidArgumentError, JobFailedError
from shoal.jobs.kind import driver_of, parse_spec
from shoal.kinds.plan.call import planned_size
from shoal.pool.journal import usage
from shoal.state import Store
from shoal.state.schema import JobState
from shoal.training.host import memory
from tests.support.pool_processes import nothing_left
from tests.support.ui_systems import job

URI = "local://planned?max_nodes=3&ray=false"
TWO = {"num_workers": 2, "num_cpu_per_worker": 1}


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """A training of two workers on a CSV file, which is staged before its rows can be counted."""
    rows = "".join(f"{x},{x % 7}\n" for x in range(500))
    (tmp_path / "rows.csv").write_text(f"x,y\n{rows}")
    dataset = {"paths": [str(tmp_path / "rows.csv")], "format": "csv"}
    params = {"objective": "reg:squarederror"}
    return {"dataset": dataset, "input_cols": ["x"], "label_col": "y", "scaling_config": TWO, "params": params}


@pytest.fixture
def planned(fresh_home: Path) -> Iterator[ComputePool]:
    pool = ComputePool(URI)
    yield pool
    pool.down()
    nothing_left()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_pool_that_is_down_plans_on_its_first_node(planned: ComputePool, fields: dict[str, Any]) -> None:
    with planned.lease("auto", plan_for=fields, bring_up=True):
        assert len(planned.get_nodes()) == 2
        [plan] = jobs.list_jobs()
        assert (plan.state, plan.result.rows, plan.result.plan["chosen"]) == (JobState.SUCCEEDED, 500, 2)
        assert plan.result.plan["reasoning"] in [*jobs.attach(plan.job_id).logs()]
        log: list[str] = []
        task = jobs.TaskTry("lease/-1", 1)
        tries = [planned_size(planned, fields, key="lease/-1", task=task, on_log=log.append)]
        assert any(line.startswith("xgboost on 500 rows x 1 features needs 2 node(s)") for line in log)
        tries.append(planned_size(planned, fields, key="lease/-1", task=jobs.TaskTry("lease/-1", 2)))
        assert tries == [2, 2]
        assert len(jobs.list_jobs()) == 2, "both tries have the same plan"
        missing = {**fields, "input_cols": ["z"]}
        with pytest.raises(JobFailedError, match='no column "z"'):
            planned.scale("auto", plan_for=missing)
        assert planned.scale("auto", plan_for=parse_spec({**fields, "scaling_config": {"num_workers": 3}}))
        assert len(planned.get_nodes()) == 3
        planned.alter(min_nodes=2)
        assert planned_size(planned, {**fields, "scaling_config": {**TWO, "num_workers": 1}}) == 2, "MIN_NODES now"
        function = {"framework": "pytorch", "train_func": "os:getpid", "run_config": {"pool_name": "planned"}}
        with pytest.raises(InvalidArgumentError, match="give the number of nodes"):
            planned_size(planned, function)
        jobs.submit(parse_spec(function)).wait(on_log=None)
        assert planned_size(planned, function) == 1, "as many as its last run has used"
    assert planned.describe().leases == ()


def test_a_run_that_was_skipped_does_not_say_how_many_nodes_are_needed(
    fresh_home: Path, fields: dict[str, Any]
) -> None:
    spec, pool = parse_spec({**fields, "scaling_config": {"use_gpu": True}}), ComputePool(URI)
    about = {"label": spec.label, "spec": spec.document()}
    runs = ("trained", 60, None, 3), ("skipped", 1, "no new rows", 1), ("failed", 0, None, 2)
    with Store().transaction() as session:
        for name, ago, why, nodes in runs:
            state = JobState.FAILED if name == "failed" else JobState.SUCCEEDED
            run = job(name, pool.name, state, ago, result={"skipped": why}, **about)
            session.add(run)
            usage.job_uses(session, run, nodes, run.created_at)
    assert planned_size(pool, spec) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"expected_cluster_size": "auto"}, "with plan_for=None: give"),
        ({"expected_cluster_size": 2, "plan_for": {}}, "expected_cluster_size=2 with plan_for={}"),
        ({"expected_cluster_size": "two"}, "a whole number of nodes"),
    ],
)
def test_auto_and_plan_for_belong_together(fresh_home: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        shoal.scale_cluster(**arguments)


def test_what_fits_on_no_size_fails_with_the_terms(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pd.DataFrame({"x": range(500), "y": range(500)}).to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr(memory, "available_bytes", lambda: 400 * 2**20)
    monkeypatch.setattr(ComputePool, "describe", lambda _: SimpleNamespace(uri=URI))
    training = {**fields, "params": {}, "dataset": {"paths": [str(tmp_path / "rows.parquet")]}, "framework": "lightgbm"}
    spec = parse_spec({"framework": "plan", "training": training, "run_config": {"pool_name": "planned"}})
    place: Any = SimpleNamespace(store=Store(), result=lambda **found: found)
    with pytest.raises(DataError, match=r"fits on no size up to 3 node\(s\)"):
        driver_of(spec).work(place)
