"""The sample DAGs that `shoal init airflow` writes."""

from __future__ import annotations

import runpy
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from shoal.airflow.samples import samples
from shoal.new_files import write_samples
from tests.support import ROOT


def test_the_files_are_all_dags_of_the_repository(tmp_path):
    texts = samples(tmp_path)
    assert texts == {path.name: path.read_text() for path in (ROOT / "dags").glob("*.py")}
    for path in write_samples(tmp_path, texts):
        runpy.run_path(str(path))


@pytest.mark.parametrize(("zone", "month", "day"), [("UTC", "2026-10", 30), ("Asia/Tokyo", "2026-11", 1)])
def test_days_and_months_are_those_of_the_schedules_time_zone(monkeypatch, zone, month, day):
    moment = datetime(2026, 11, 30, 18, tzinfo=UTC)  # 03:00 on 1 December in Tokyo
    monkeypatch.setattr("shoal.examples.flights.recent_files", list)
    monkeypatch.setattr("shoal.examples.delays.scheduled_spec", lambda at: SimpleNamespace(document=lambda: at.date()))
    monkeypatch.setattr("shoal.jobs.for_each", lambda spec, *args, **kwargs: spec)
    run = SimpleNamespace(logical_date=moment, run_after=moment)
    params = {"month": None, "rounds": 1, "min_rows": 1, "version": "3"}

    def returned(sample: str, task_id: str):
        code = (ROOT / "dags" / f"{sample}.py").read_text().replace('TIME_ZONE = "UTC"', f'TIME_ZONE = "{zone}"')
        names: dict = {"__name__": sample}
        exec(compile(code, sample, "exec"), names)
        names |= {
            "get_current_context": lambda: {"dag_run": run, "params": params},
            "spec_of_the_night": lambda day, rounds: day,
        }
        return names[sample]().get_task(task_id).python_callable()

    assert returned("scheduled_retraining", "prepare")["register"]["holdout"]["paths"] == [month]
    assert returned("score_on_promotion", "choose")["dataset"]["paths"] == [month]
    assert returned("train_networks", "prepare_delays").day == returned("many_models", "specs").day == day
