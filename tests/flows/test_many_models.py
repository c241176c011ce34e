"""The flow that trains one model per carrier."""

from __future__ import annotations

import os
import threading
from datetime import date

import mlflow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import get_client
from prefect.flows import load_flow_from_entrypoint

from shoal.data import DataConnector
from shoal.jobs import list_jobs
from shoal.jobs.files.storage import default_uri
from tests.support.pool_processes import a_worker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.server]
MODELS = int(os.environ.get("SHOAL_MODELS", "6"))
"""How many models the test of many models trains; `make soak` trains more."""


@pytest.fixture
def retrain_many():
    return load_flow_from_entrypoint("flows/many_models_flow.py:retrain_many")


def test_a_run_of_a_night_uses_days_that_have_ended(retrain_many):
    spec = retrain_many.fn.__globals__["spec_of_the_night"](date(2026, 3, 5), 5)
    spans = [DataConnector.from_spec(one).time_range() for one in (spec["dataset"], spec["register"]["holdout"])]
    # The last day of the holdout is the day before the run.
    days = [(span.first, span.last) for span in spans]
    assert days == [("2025-11-28", "2026-02-25"), ("2026-02-26", "2026-03-04")]


@pytest.mark.long
@pytest.mark.timeout(900 + 60 * MODELS)
def test_of_many_carriers_one_fails_alone_and_one_survives_the_loss_of_its_worker(
    retrain_many, server, real_pool, tmp_path, monkeypatch, logged
):
    carriers = [f"{number:02}" for number in range(MODELS)]
    bad = carriers[1]
    for name in ("train", "holdout"):
        rows = [(carrier, x) for carrier in carriers for x in range(60 if name == "train" else 30)]
        labels = [None if carrier == bad else float(x % 10) for carrier, x in rows]
        columns = {"carrier": [carrier for carrier, _ in rows], "x": [float(x % 10) for _, x in rows], "y": labels}
        pq.write_table(pa.table(columns), tmp_path / name, row_group_size=60)
    spec = {
        "dataset": {"paths": [str(tmp_path / "train")]},
        "input_cols": ["x"],
        "label_col": "y",
        "n_estimators": 50,
        "scaling_config": {"num_workers": 1},
        "run_config": {"max_restarts": 1},
        "register": {
            "model": "carriers-{carrier}",
            "metric": "rmse",
            "holdout": {"paths": [str(tmp_path / "holdout")]},
        },
    }
    monkeypatch.setitem(retrain_many.fn.__globals__, "spec_of_the_night", lambda day, rounds: spec)
    sizes: set[int] = set()
    is_over = threading.Event()

    def kill_and_watch() -> None:
        wait_until(a_worker, "a worker", 300, every=0.5).kill()
        while not is_over.wait(0.5):
            status = real_pool.describe()
            sizes.add(len(status.active) + len(status.pending) + len(status.leaving))

    watcher = threading.Thread(target=kill_and_watch)
    watcher.start()
    try:
        ended = retrain_many(min_rows=1, pool="tests", return_state=True)
    finally:
        is_over.set()
        watcher.join()

    assert ended.is_failed()
    headline = f"{MODELS} jobs: {MODELS - 1} promoted, 1 failed"
    assert headline in ended.message
    assert 'column "y"' in logged(f"failed    carriers-{bad}")
    with get_client(sync_client=True) as client:
        [table] = [artifact for artifact in client.read_artifacts() if artifact.key == "many-models"]
    assert table.description == headline
    mine = [job for job in list_jobs("tests", limit=1000) if job.holder == f"prefect:{ended.state_details.flow_run_id}"]
    assert sorted(job.state.value for job in mine) == ["failed"] + ["succeeded"] * (MODELS - 1)
    assert sum(job.result.restarts for job in mine if job.result) == 1
    versions = mlflow.MlflowClient(default_uri()).search_model_versions("name LIKE 'carriers-%'", max_results=1000)
    assert len(versions) == MODELS - 1
    assert max(sizes) <= 4
    assert not real_pool.describe().leases
