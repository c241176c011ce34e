"""The janitor flow and its automations."""

from __future__ import annotations

import pytest
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.flows import load_flow_from_entrypoint
from prefect.states import Crashed

from shoal.pool.api import ComputePool
from shoal.state import Store
from shoal.state.schema import Job, JobState

pytestmark = pytest.mark.server
FILE = "flows/pool_janitor_flow.py"


@pytest.fixture
def janitor():
    return load_flow_from_entrypoint(f"{FILE}:pool_janitor")


def test_it_ends_what_an_ended_run_left(server, tiny, janitor, logged):
    up = ComputePool("local://tiny?max_nodes=4").up()
    with get_client(sync_client=True) as client:
        run_id = client.create_flow_run(janitor, state=Crashed()).id
    ComputePool("tiny", holder=f"prefect:{run_id}").lease(2)
    assert any("released the lease" in sentence for sentence in janitor())
    assert up.describe().leases == ()
    assert janitor() == []
    logged(f"released the lease of prefect:{run_id}")


def test_the_retention_removes_old_jobs(server, fresh_home, janitor, logged, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with Store().transaction() as session:
        session.add(
            Job(
                id="old",
                attempt=1,
                pool="gone",
                holder="cli:me@here",
                spec={},
                state=JobState.FAILED,
                endpoint={},
                last_polled_at=0.0,
                created_at=0.0,
                ended_at=1.0,
            )
        )
    retention = janitor.fn.__globals__["retention"]
    said = "deleted 1 ended attempts of 1 jobs"
    assert retention(dry_run=True) == [said.replace("deleted", "would delete")]
    assert retention() == [said]
    assert retention() == []
    logged(said)


def test_its_automations_are_made_once(server, janitor):
    module = janitor.fn.__globals__
    every_five_minutes, after_a_crash, every_night = module["deployments"]()
    assert [schedule.schedule.cron for schedule in every_night.schedules] == ["30 4 * * *"]
    assert [schedule.schedule.cron for schedule in every_five_minutes.schedules] == ["*/5 * * * *"]
    deployment = after_a_crash.apply()
    first, second = ([one.id for one in module["automate"](deployment)] for _ in range(2))
    assert first == second
    kept = Automation.read(id=first[1])
    assert kept.actions[0].deployment_id == deployment
    assert kept.trigger.expect == {"prefect.flow-run.Crashed"}
