"""Runs on a whole server that others end: cancelled where they are served, or killed and found by the janitor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Crashed, Scheduled

from examples.prefect_run import _process
from shoal.pool.api import ComputePool as CorePool
from shoal.state.home import home, lock_file, open_locked
from tests.support import waiting_jobs
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

SILENCE = 15
"""Seconds. Shorter than the 30 that are between two heartbeats at least: fit for nothing but a run that is killed."""

_JANITOR = f"""
from datetime import timedelta
from flows.pool_janitor_flow import serve_janitor
serve_janitor(timedelta(seconds={SILENCE}))
"""

MODEL = "recent-flight-delays"
ON_PROMOTION = f"shoal: score when {MODEL} was promoted"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def client(server: dict[str, str]) -> Iterator[SyncPrefectClient]:
    """A client of the server, without the automations and deployments that other tests have made there."""
    with get_client(sync_client=True) as client:
        for kind in ("automations", "deployments"):
            for made in client.request("POST", f"/{kind}/filter", json={}).json():
                client.request("DELETE", f"/{kind}/{made['id']}")
        yield client


@pytest.fixture
def start(server: dict[str, str], tiny) -> Iterator[Start]:
    """Starts Python with some arguments, beside the pool `tiny` with one node; all of them end with the test."""
    CorePool("local://tiny?max_nodes=4").up()
    own = {name: server[name] for name in server if name.startswith("PREFECT_")}
    environment = {**os.environ, **own, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(_process([sys.executable, *arguments], environment, 30.0))
    CorePool("tiny").down()
    wait_until(no_reconciler, "the reconciler that the janitor started to end")


def no_reconciler() -> bool:
    with open_locked(lock_file("reconciler"), wait=False) as free:
        return bool(free)


def state() -> tuple[int, int]:
    """Nodes and leases of the pool."""
    status = CorePool("tiny").describe()
    return len(status.active) + len(status.pending) + len(status.leaving), len(status.leases)


def held() -> str | None:
    """The run that holds its nodes and waits."""
    file = home() / "held-by"
    return file.read_text() if file.exists() else None


def deployed(client: SyncPrefectClient, name: str):
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


@pytest.mark.parametrize("flow", ["hold", *(pytest.param(name, marks=pytest.mark.long) for name in ("leave", "lead"))])
def test_a_served_run_that_is_cancelled_gives_its_nodes_back(client, start, flow):
    start("-m", "tests.prefect.holding", "serve")
    deployment = wait_until(lambda: deployed(client, f"{flow}/served"), "the flow to be served", 60)
    run_id = client.create_flow_run_from_deployment(deployment.id).id
    assert wait_until(held, "the run to hold its nodes", 60) == str(run_id)
    client.set_flow_run_state(run_id, Cancelling())
    wait_until(lambda: state() == (1, 0), "the pool to be as before", 60)  # Prefect kills after 30
    assert waiting_jobs.unfinished() == set()
    wait_until(lambda: client.read_flow_run(run_id).state.is_cancelled(), "the run to be cancelled")


@pytest.mark.long
def test_the_janitor_finds_a_run_that_is_killed_and_does_not_follow_its_own(client, start):
    start("-c", _JANITOR)
    deployment = wait_until(lambda: deployed(client, "pool-janitor/after-a-crash"), "the janitor to be served", 60)
    wait_until(lambda: client.request("POST", "/automations/count").json() == 2, "the automations")
    tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
    own = client.create_flow_run_from_deployment(deployment.id, state=tomorrow)
    client.set_flow_run_state(own.id, Crashed())
    run = start("-m", "tests.prefect.holding")
    run_id = wait_until(held, "the run to hold its nodes", 60)
    wait_until(lambda: heartbeats(client, run_id), "a heartbeat")
    run.kill()
    wait_until(lambda: state() == (1, 0), "the pool to be as before", SILENCE + 60)
    ended = client.read_flow_run(run_id).state
    assert ended.is_crashed() and ended.message == "its heartbeat stopped"
    ends = ["Completed", "Crashed"]  # what the automation ran once, and the janitor that crashed before
    wait_until(lambda: sorted(states_of(client, deployment.id)) == ends, "the janitor's run to complete")


def states_of(client: SyncPrefectClient, deployment_id: UUID) -> list[str]:
    runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]))
    return [run.state.name for run in client.read_flow_runs(flow_run_filter=runs)]


def heartbeats(client: SyncPrefectClient, run_id: str) -> int:
    """How many have reached the server."""
    wanted = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run_id}"]},
        "occurred": {"since": "2000-01-01T00:00:00Z"},
    }
    return client.request("POST", "/events/filter", json={"filter": wanted}).json()["total"]


_PROMOTED = f"""
from shoal.prefect.reports import emit_outcome
from tests.support.job_results import result_of
spec = {{"register": {{"model": "{MODEL}", "metric": "rmse"}}}}
for promoted, version in ((False, "6"), (True, "7")):
    emit_outcome(spec, result_of(promoted=promoted, model_version=version))
"""


@pytest.mark.long
def test_a_promotion_starts_the_scoring_with_its_version(client, start):
    serving = start("flows/score_on_promotion_flow.py")
    deployment = wait_until(lambda: deployed(client, "score-on-promotion/on-promotion"), "the flow to be served", 60)
    wait_until(lambda: ON_PROMOTION in automations(client), "the automation")
    serving.send_signal(signal.SIGINT)  # so that the run is created and does not begin
    serving.wait(60)
    start("-c", _PROMOTED).wait(60)
    runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
    [run] = wait_until(lambda: client.read_flow_runs(flow_run_filter=runs), "the run of the event", 60)
    assert run.parameters == {"version": "7"}


def automations(client: SyncPrefectClient) -> list[str]:
    return [each["name"] for each in client.request("POST", "/automations/filter").json()]
