"""Trials in MLflow: a server that is away ends no search, and gets the trials later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.jobs.mlflow_run import Run
from shoal.kinds.search import driver
from shoal.kinds.search.driver import TrialRuns
from shoal.kinds.search.study_storage import Ended
from tests.support.waiting import wait_until


class Client:
    """MLflow's client, which fails while the server is away."""

    def __init__(self) -> None:
        self.is_away = True
        self.asked = 0
        self.runs: list[dict[str, Any]] = []

    def create_run(self, experiment: str, **given: Any) -> Any:
        self.asked += 1
        if self.is_away:
            raise ConnectionError("no server")
        self.runs.append(given)
        data = SimpleNamespace(params={}, metrics={})
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs))), data=data)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        logged = self.runs[int(run_id) - 1].setdefault("logged", {})
        logged |= {each.key: each.value for each in (*metrics, *params)}

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[int(run_id) - 1]["status"] = status


def ended(number: int, state: str = "complete") -> Ended:
    return Ended(number, state, {"x": number}, 1.0, {"rmse": 1.0}, 3, 0.5, None, None, None)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setattr(driver, "METRICS_PERIOD_S", 0.01)
    return Client()


def runs_of(client: Client) -> TrialRuns:
    return TrialRuns(Run(client, "", "1", "parent", ""), {"shoal.job_id": "job"})  # type: ignore[arg-type]


def test_trials_are_sent_when_the_server_is_back(client, capsys):
    runs = runs_of(client)
    runs.add(ended(0))
    runs.add(ended(1, "failed"))
    wait_until(lambda: client.asked > 2, "some tries")
    client.is_away = False

    runs.close()

    assert [each["run_name"] for each in client.runs] == ["trial 0", "trial 1"]
    assert [each["status"] for each in client.runs] == ["FINISHED", "FAILED"]
    assert client.runs[0]["logged"] == {"x": "0", "rmse": 1.0, "value": 1.0}
    assert client.runs[0]["tags"]["mlflow.parentRunId"] == "parent"
    assert capsys.readouterr().out.count("cannot be recorded in MLflow now") == 1


def test_the_end_of_a_search_does_not_wait_for_a_server_that_is_away(client, monkeypatch, capsys):
    monkeypatch.setattr(driver, "TRIAL_RUNS_END_S", 0.05)
    runs = runs_of(client)
    runs.add(ended(0))

    runs.close()

    assert "1 trials are not recorded in MLflow" in capsys.readouterr().out
    wait_until(lambda: not runs._thread.is_alive(), "the end of the thread")
