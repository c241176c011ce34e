"""The last net: ends what nobody owns, and what flow runs that are over left on any pool.

``python flows/pool_janitor_flow.py`` serves it every five minutes, beside the deployment `after-a-crash`, and sets up
two automations on the server: a run whose heartbeat stops for `SILENCE` counts as crashed, and a run that crashed is
cleaned up after at once. A run whose process was killed is thus cleaned up after within `SILENCE` and what a run
takes to start. Without automations its job ends after `orphan_after`, and its lease with its time to live.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from prefect import flow, serve, task
from prefect.automations import Automation
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from shoal.jobs import sweep
from shoal.prefect import clean_up_ended_runs

SILENCE = timedelta(minutes=9)
"""Three of Prefect's heartbeats, which are 180 s apart by default. The automation looks at every run of the server, so
it must not be shorter; where all flows have ``PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30``, 90 s will do."""

_NO_HEARTBEAT_NEEDED = (
    "Completed",
    "Crashed",
    "Failed",
    "TimedOut",
    "Cancelled",
    "Paused",
    "Suspended",
    "AwaitingRetry",
)
_RUN = "prefect.flow-run"


@task(cache_policy=NO_CACHE)
def end_what_is_left() -> list[str]:
    """Clean up after runs that have ended, then end what nobody owns."""
    did = [*clean_up_ended_runs(), *sweep()]
    for sentence in did:
        get_run_logger().info(sentence)
    return did


@flow(name="pool-janitor")
def pool_janitor() -> list[str]:
    """Sweep every pool of this host.

    Returns:
        What was done, a sentence each.
    """
    return end_what_is_left()


def automate(deployment_id: UUID, silence: timedelta = SILENCE) -> list[Automation]:
    """Create, or bring up to date, the two automations; safe to call at every start.

    Args:
        deployment_id: The deployment to run after a run has crashed.
        silence: How long a run may be without a heartbeat.

    Raises:
        httpx.HTTPStatusError: The server has no automations, or no right to make one was given.
    """
    crashed = Automation(
        name="shoal: a run without heartbeat has crashed",
        trigger=EventTrigger(
            after={f"{_RUN}.heartbeat"},
            expect={f"{_RUN}.{what}" for what in ("heartbeat", *_NO_HEARTBEAT_NEEDED)},
            match=ResourceSpecification({"prefect.resource.id": f"{_RUN}.*"}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silence,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="its heartbeat stopped")],
    )
    clean = Automation(
        name="shoal: clean up after a run that crashed",
        trigger=EventTrigger(
            expect={f"{_RUN}.Crashed"},  # the others ran their hooks
            match=ResourceSpecification({"prefect.resource.id": f"{_RUN}.*"}),
            # A janitor that crashes would start the next one, for ever.
            match_related=ResourceSpecification(
                {"prefect.resource.role": "flow", "prefect.resource.name": f"!{pool_janitor.name}"}
            ),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[RunDeployment(source="selected", deployment_id=deployment_id)],
    )
    return [_put(crashed), _put(clean)]


def _put(automation: Automation) -> Automation:
    try:
        automation.id = Automation.read(name=automation.name).id
    except (ObjectNotFound, ValueError):  # how it is not found differs between releases of Prefect
        return automation.create()
    automation.update()
    return automation


def deployments() -> list[RunnerDeployment]:
    """The janitor on its cron, and once more without one for the automation to run."""
    return [
        pool_janitor.to_deployment(name="every-five-minutes", cron="*/5 * * * *", concurrency_limit=1),
        pool_janitor.to_deployment(name="after-a-crash"),
    ]


def main(silence: timedelta = SILENCE) -> None:
    """Set up the automations and serve, until the process is ended.

    Args:
        silence: How long a run may be without a heartbeat.
    """
    every_five_minutes, after_a_crash = deployments()
    automate(after_a_crash.apply(), silence)
    serve(every_five_minutes, after_a_crash, pause_on_shutdown=False)


if __name__ == "__main__":
    main()
