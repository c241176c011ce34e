"""Send an event about each model whose last promotion is too long ago, and about each job that has waited too long.

``python flows/model_alerts_flow.py`` serves the flow every hour. The events are ``shoal.model.stale`` and
``shoal.job.waiting``. An automation can send a notification about these events, at most once a day for each model and
each job. The guide docs/prefect-deployments.md shows how to create the automation.
"""

from __future__ import annotations

from datetime import timedelta

from prefect import flow
from prefect.logging import get_run_logger

from shoal.prefect import emit_alerts


@flow(name="model-alerts")
def model_alerts(promoted_within_days: float = 70, started_within_hours: float = 1) -> list[str]:
    """Check all models and jobs of shoal's store.

    Args:
        promoted_within_days: Longest time since a model's last promotion. The models of the samples are trained every
            month.
        started_within_hours: Longest time that a job may wait in the queue of its pool.

    Returns:
        One sentence for each event.
    """
    alerts = emit_alerts(
        promoted_within=timedelta(days=promoted_within_days), started_within=timedelta(hours=started_within_hours)
    )
    for alert in alerts:
        get_run_logger().warning(alert)
    return alerts


if __name__ == "__main__":
    model_alerts.serve(name="hourly", cron="0 * * * *", pause_on_shutdown=False)
