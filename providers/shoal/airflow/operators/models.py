"""Operator that checks how long ago models were promoted and how long jobs have waited. If a check fails, the operator
raises `ModelAlertError`, which this module also defines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.base.checked import CheckedOperator
from shoal.airflow.checks import Arguments, is_known
from shoal.airflow.retries import no_retry_of_permanent_errors
from shoal.errors import InvalidArgumentError, shown

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import Message


class ModelAlertError(AirflowFailException):
    """Raised by `CheckModelsOperator` if a model's last promotion is too long ago, or if a job has waited too long.

    :param alerts: One sentence for each model and each job.
    """

    def __init__(self, alerts: Sequence[str]) -> None:
        super().__init__("; ".join(alerts))
        self.alerts = tuple(alerts)

    @property
    def message(self) -> Message:
        """Return the alerts as a message for users, with one line for each model or job that failed the check."""
        from shoal.jobs import Message

        count = len(self.alerts)
        return Message(self.alerts[0] if count == 1 else f"{count} alerts about models", "\n".join(self.alerts))


class CheckModelsOperator(CheckedOperator):
    """Operator that fails if a model's last promotion is too long ago, or if a job has waited too long in a queue.

    The error has one sentence for each model and job that fails the check. To get the error as a message, set
    ``on_failure_callback`` to ``model_message(notifier)`` from `shoal.airflow.notifications`. The task is not retried.

    :param promoted_within: Longest time since a model's last promotion. None: promotions are not checked.
    :param started_within: Longest time that a job may wait in the queue of its pool. None: jobs are not checked.
    :param models: Names of the models to check; a model that was never trained fails the check, too. By default, all
        models that shoal's store knows.
    """

    def __init__(
        self,
        *,
        promoted_within: timedelta | None = None,
        started_within: timedelta | None = None,
        models: Collection[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if promoted_within is None and started_within is None:
            raise InvalidArgumentError(
                f"task {self.task_id} has nothing to check: give promoted_within, started_within or both"
            )
        self.promoted_within = promoted_within
        self.started_within = started_within
        self.models = models
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check that the two times are positive durations, and that the models are not a text."""
        for name in ("promoted_within", "started_within"):
            bound = arguments[name]
            if bound is None or not is_known(bound):
                continue
            if not isinstance(bound, timedelta) or bound <= timedelta(0):
                raise InvalidArgumentError(
                    f"{name}={shown(bound)} must be a positive timedelta, such as timedelta(days=40)"
                )
        if isinstance(models := arguments["models"], str):
            raise InvalidArgumentError(f'models="{models}" is a text, but must be a list of names: ["{models}"]')

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> None:
        """Raise `ModelAlertError` if a model's last promotion is too long ago, or a job has waited too long."""
        from shoal.jobs import stale_models, waiting_jobs

        alerts: list[object] = []
        if self.promoted_within is not None:
            alerts += stale_models(self.promoted_within, self.models)
        if self.started_within is not None:
            alerts += waiting_jobs(self.started_within)
        if alerts:
            raise ModelAlertError([str(alert) for alert in alerts])
