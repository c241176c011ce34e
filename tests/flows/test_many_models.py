"""The flow that trains one model per carrier."""

from __future__ import annotations

from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import get_client
from prefect.flows import load_flow_from_entrypoint

from shoal.data import DataConnector

pytestmark = [pytest.mark.ray, pytest.mark.server]


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
@pytest.mark.timeout(600)  # a Prefect server, a pool, and three trainings on a busy machine
def test_a_carrier_that_fails_fails_alone(retrain_many, server, real_pool, tmp_path, monkeypatch, logged):
    rows = 90
    carriers = ["AA", "B6", "UA"] * 30
    labels = [None if carrier == "B6" else float(row % 10) for row, carrier in enumerate(carriers)]
    columns = {"x": [float(row % 10) for row in range(rows)], "carrier": carriers, "y": labels}
    for name in ("train", "holdout"):
        pq.write_table(pa.table({**columns, "part": [name] * rows}), tmp_path / name)
    spec = {
        "dataset": {"paths": [str(tmp_path / "train")]},
        "input_cols": ["x"],
        "label_col": "y",
        "n_estimators": 3,
        "scaling_config": {"num_workers": 1},
        "register": {"model": "many", "metric": "rmse", "holdout": {"paths": [str(tmp_path / "holdout")]}},
    }
    monkeypatch.setitem(retrain_many.fn.__globals__, "spec_of_the_night", lambda day, rounds: spec)

    ended = retrain_many(min_rows=1, pool="tests", return_state=True)

    assert ended.is_failed()
    assert "3 models: 2 promoted, 1 failed" in ended.message
    assert 'column "y"' in logged("failed    many-B6")
    with get_client(sync_client=True) as client:
        [table] = [artifact for artifact in client.read_artifacts() if artifact.key == "many-models"]
    assert table.description == "3 models: 2 promoted, 1 failed"
    assert not real_pool.describe().leases
