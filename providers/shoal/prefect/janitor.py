"""Flows that clean up after ended flow runs on all pools, and delete what is old; the automations that start them.

A process that is killed runs no hook. So one automation sets a run to Crashed when the run has had no heartbeat for
`SILENCE`, and another runs the deployment `after-a-crash` of the janitor as soon as a run has crashed. A killed run is
therefore cleaned up after `SILENCE` plus the time that a run needs to start. Without the automations, the killed run's
job ends after `orphan_after`, and its lease expires after its time to live.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

from prefect import flow, serve, task
from prefect.automations import Automation
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from shoal.jobs import retain, sweep
from shoal.prefect.lease import clean_up_ended_runs

SILENCE = timedelta(minutes=9)
"""Time without a heartbeat after which a run counts as crashed: three of Prefect's heartbeats, which are 180 s apart by
default. The time must not be shorter, because the automation applies to every run of the server. If all flows have
``PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30``, 90 s is enough."""

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

_HAS_CRASHED = "shoal: a run without heartbeat has crashed"
_CLEAN_UP = "shoal: clean up after a run that crashed"
"""Names of the automations on the server."""

AFTER_A_CRASH = "pool-janitor/after-a-crash"
"""Name of the deployment that the second automation runs."""


@task(cache_policy=NO_CACHE)
def end_what_is_left() -> list[str]:
    """Clean up after ended flow runs, and remove nodes and processes that no run needs any more; return and log the
    actions."""
    return _logged([*clean_up_ended_runs(), *sweep()])


@flow(name="pool-janitor")
def pool_janitor() -> list[str]:
    """Clean up after ended flow runs on every pool of this host.

    Returns:
        The actions that were taken, one sentence each.
    """
    return end_what_is_left()


@task(cache_policy=NO_CACHE)
def delete_old(**options: Any) -> list[str]:
    """Delete old model versions and old jobs; return and log the actions. The options are those of `retain`."""
    return _logged(retain(**options))


def _logged(did: list[str]) -> list[str]:
    for sentence in did:
        get_run_logger().info(sentence)
    return did


@flow(name="retention")
def retention(
    versions_older_than_days: int = 90,
    keep_last: int = 10,
    jobs_older_than_days: int = 90,
    tracking_uri: str | None = None,
    dry_run: bool = False,
) -> list[str]:
    """Delete old versions of registered models to which no alias points, and jobs that ended long ago.

    Args:
        versions_older_than_days: Model versions of this age in days or more are deleted.
        keep_last: Number of newest versions of each model that are kept.
        jobs_older_than_days: Jobs that ended this many days ago or earlier are deleted.
        tracking_uri: MLflow server or database; None: MLFLOW_TRACKING_URI, or the database in `$SHOAL_HOME`.
        dry_run: Delete nothing, only return and log what would be deleted.

    Returns:
        The actions that were taken, one sentence each.
    """
    return delete_old(
        versions_older_than=timedelta(days=versions_older_than_days),
        keep_last=keep_last,
        jobs_older_than=timedelta(days=jobs_older_than_days),
        tracking_uri=tracking_uri,
        dry_run=dry_run,
    )


def automate(deployment: UUID | str = AFTER_A_CRASH, silence: timedelta = SILENCE) -> list[Automation]:
    """Create or update the two automations on the Prefect server, and return them.

    The function may be called at every start: an automation that exists already is updated.

    Args:
        deployment: Id of the deployment to run after a run has crashed, or its name with the name of its flow.
        silence: Time without a heartbeat after which a run counts as crashed.

    Raises:
        prefect.exceptions.ObjectNotFound: There is no deployment of this name.
        httpx.HTTPStatusError: The server does not support automations, or the user may not create one.
    """
    if isinstance(deployment, str):
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name(deployment).id
    crashed = Automation(
        name=_HAS_CRASHED,
        trigger=EventTrigger(
            after={f"{_RUN}.heartbeat"},
            expect={f"{_RUN}.{what}" for what in ("heartbeat", *_NO_HEARTBEAT_NEEDED)},
            match=ResourceSpecification({"prefect.resource.id": f"{_RUN}.*"}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silence,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="its heartbeat stopped")],  # type: ignore[call-arg]
    )
    clean = Automation(
        name=_CLEAN_UP,
        trigger=EventTrigger(
            expect={f"{_RUN}.Crashed"},  # A run in another final state was cleaned up by its hooks.
            match=ResourceSpecification({"prefect.resource.id": f"{_RUN}.*"}),
            # The janitor itself is excluded. Otherwise each crash of a janitor run would start another janitor run.
            match_related=ResourceSpecification(
                {"prefect.resource.role": "flow", "prefect.resource.name": f"!{pool_janitor.name}"}
            ),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[RunDeployment(source="selected", deployment_id=deployment)],  # type: ignore[call-arg]
    )
    return [_put(crashed), _put(clean)]


def remove_automations() -> None:
    """Remove the two automations from the Prefect server. Automations that do not exist are no error."""
    for name in (_HAS_CRASHED, _CLEAN_UP):
        if (found := _named(name)) is not None:
            found.delete()


def _put(automation: Automation) -> Automation:
    found = _named(automation.name)
    if found is None:
        return cast("Automation", automation.create())
    automation.id = found.id
    automation.update()
    return automation


def _named(name: str) -> Automation | None:
    # If there is no automation of this name, the type of the error depends on Prefect's version.
    with suppress(ObjectNotFound, ValueError):
        return cast("Automation", Automation.read(name=name))
    return None


def deployments() -> list[RunnerDeployment]:
    """Return the deployments: the janitor with a schedule, the janitor that the automation runs, and the retention."""
    found = [
        pool_janitor.to_deployment(name="every-five-minutes", cron="*/5 * * * *", concurrency_limit=1),
        pool_janitor.to_deployment(name="after-a-crash"),
        retention.to_deployment(name="every-night", cron="30 4 * * *", concurrency_limit=1),
    ]
    return cast("list[RunnerDeployment]", found)


def serve_janitor(silence: timedelta = SILENCE) -> None:
    """Create the automations, and serve the flows until the process is ended.

    Args:
        silence: Time without a heartbeat after which a run counts as crashed.
    """
    every_five_minutes, after_a_crash, every_night = deployments()
    automate(cast("UUID", after_a_crash.apply()), silence)
    serve(every_five_minutes, after_a_crash, every_night, pause_on_shutdown=False)
