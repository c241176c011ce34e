"""The flow of the two networks on a real pool."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect.flows import load_flow_from_entrypoint

from shoal.examples import delays, digits
from shoal.jobs import list_jobs

pytestmark = [pytest.mark.ray, pytest.mark.server]
FLOW = "flows/train_networks_flow.py:train_networks"


def test_a_scheduled_run_trains_on_months_that_have_ended():
    prepare = load_flow_from_entrypoint(FLOW).fn.__globals__["prepare_delays"]
    spec = prepare.fn(None, datetime(2026, 3, 1, 6, tzinfo=UTC))
    months = [Path(path).stem for path in (*spec.dataset_map["train"].paths, *spec.register_as.holdout.paths)]
    assert months == ["2025-11", "2025-12", "2026-01", "2026-02"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_networks_are_trained_judged_and_registered(server, real_pool):
    train_networks = load_flow_from_entrypoint(FLOW)
    lines = {line["model"]: line for line in train_networks(epochs=12, month=2, pool="tests")}
    assert lines[digits.MODEL]["metric"] == "accuracy" and lines[digits.MODEL]["value"] > 0.9
    assert lines[delays.MODEL]["metric"] == "rmse" and lines[delays.MODEL]["value"] < 25
    assert {line["outcome"] for line in lines.values()} <= {"promoted", "kept"}
    assert {job.state.value for job in list_jobs("tests")[:2]} == {"succeeded"}
    status = real_pool.describe()
    assert not status.leases


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_network_that_cannot_be_prepared_does_not_stop_the_other(server, real_pool, logged):
    train_networks = load_flow_from_entrypoint(FLOW)
    ended = train_networks(epochs=1, month=13, pool="tests", return_state=True)
    assert ended.is_failed()
    assert "1 failed" in ended.message
    assert "failed    delays: the month must be from 1 to 12" in logged("failed    delays")
    assert list_jobs("tests")[0].state.value == "succeeded"
