"""The flow that a promotion starts: what starts it, and what it predicts."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.events.schemas.events import Resource
from prefect.flows import load_flow_from_entrypoint

MODEL = "recent-flight-delays"


@pytest.fixture
def score():
    return load_flow_from_entrypoint("flows/score_on_promotion_flow.py:score")


def test_it_is_started_by_the_event_of_its_model_alone(score):
    trigger = score.fn.__globals__["ON_PROMOTION"]
    assert trigger.expect == {"shoal.model.promoted"}
    named = {name: Resource({"prefect.resource.id": f"shoal.model.{name}"}) for name in (MODEL, "another")}
    assert [name for name, resource in named.items() if trigger.match.matches(resource)] == [MODEL]


def test_it_predicts_the_last_complete_month_with_the_version(score, fresh_home, monkeypatch):
    asked = []
    scope = score.fn.__globals__
    monkeypatch.setitem(scope, "flow_run", SimpleNamespace(scheduled_start_time=datetime(2026, 3, 31, tzinfo=UTC)))
    monkeypatch.setitem(scope, "pool_lease", lambda size, pool_name: nullcontext(SimpleNamespace(name="flights")))
    monkeypatch.setitem(scope, "recent_files", lambda months: [f"/data/{month}.parquet" for month in months])
    monkeypatch.setitem(scope, "DataConnector", SimpleNamespace(from_parquet=lambda paths: paths))
    monkeypatch.setitem(scope, "batch_predict", lambda *args, pool_name: asked.append(args))
    score.fn("7")
    [(model, paths, output)] = asked
    assert (model, paths) == (f"models:/{MODEL}/7", ["/data/2026-02.parquet"])
    assert Path(output).parts[-2:] == ("version-7", "2026-02")
