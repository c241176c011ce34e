"""Check every morning whether a model's last promotion is too long ago, or a job has waited too long.

If a check fails, the task fails, and the error names the models and the jobs. To get a message about the failure, give
the task a notifier of your own::

    on_failure_callback=model_message(SmtpNotifier(to="ml@example.com", subject="{{ shoal.subject }}", ...))
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import CronTriggerTimetable, dag

from shoal.airflow.operators import CheckModelsOperator


@dag(
    schedule=CronTriggerTimetable("0 8 * * *", timezone="UTC", run_immediately=timedelta(hours=1)),
    catchup=False,
    max_active_runs=1,
    default_args={"owner": "ml-platform"},
    tags=["shoal", "alerts"],
    doc_md=__doc__,
)
def model_alerts() -> None:
    """Check all models and jobs of shoal's store in one task."""
    CheckModelsOperator(
        task_id="check",
        promoted_within=timedelta(days=70),  # The models of the samples are trained every month.
        started_within=timedelta(hours=1),
    )


model_alerts()
