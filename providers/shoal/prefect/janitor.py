"""Clean up after flow runs for which Prefect called no hook, for example because a process was killed."""

from __future__ import annotations

from uuid import UUID

from prefect import get_client
from prefect.exceptions import ObjectNotFound

from shoal.jobs import cleanup
from shoal.prefect._run_holder import ENGINE
from shoal.prefect.hooks import ended_as


def clean_up_ended_runs() -> list[str]:
    """Cancel the jobs and release the leases of all flow runs that have ended.

    Call this function in a flow that runs periodically. A run that this Prefect server does not know may belong to
    another server. So the jobs and leases of an unknown run are not changed. The leases of an unknown run expire when
    they are no longer renewed.

    Returns:
        One sentence for each action.
    """
    with get_client(sync_client=True) as client:

        def why_ended(run_id: str) -> str | None:
            try:
                state = client.read_flow_run(UUID(run_id)).state
            # If a user has chosen the name of a lease's holder, `run_id` is not a UUID, and `UUID` raises ValueError.
            # If the flow run belongs to another Prefect server, the client raises ObjectNotFound.
            except (ValueError, ObjectNotFound):
                return None
            return ended_as(state) if state and state.is_final() else None

        return cleanup.clean_up_ended_runs(ENGINE, why_ended)
