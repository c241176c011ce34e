"""Operators that promote a registered version that waits for a decision, and that check how long ago models were
promoted and how long jobs have waited. If the check fails, its operator raises `ModelAlertError`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowFailException

from shoal import jobs
from shoal.airflow.deployment import holder_of, team_of
from shoal.airflow.hooks import database_url, environment_of
from shoal.airflow.operators.base import UNKNOWN, Arguments, CheckedOperator, LabelledOperator, is_known
from shoal.airflow.results import PROMOTIONS, no_retry_of_permanent_errors, record_failure, record_success
from shoal.errors import InvalidArgumentError, ShoalError
from shoal.option_validation import positive_seconds
from shoal.os_processes import variables_set
from shoal.pool.holder import acting_for

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.models.gate import Training


class ModelAlertError(AirflowFailException):
    """Raised by `CheckModelsOperator` if a model's last promotion is too long ago, or if a job has waited too long.

    :param alerts: One sentence for each model and each job.
    """

    def __init__(self, alerts: Sequence[str]) -> None:
        super().__init__("; ".join(alerts))
        self.alerts = tuple(alerts)

    @property
    def message(self) -> jobs.Message:
        """Return the alerts as a message for users, with one line for each model or job that failed the check."""

        count = len(self.alerts)
        return jobs.Message(self.alerts[0] if count == 1 else f"{count} alerts about models", "\n".join(self.alerts))


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
            if (bound := arguments[name]) is not None and is_known(bound):
                positive_seconds(name, bound)
        if isinstance(models := arguments["models"], str):
            raise InvalidArgumentError(f'models="{models}" is a text, but must be a list of names: ["{models}"]')

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> None:
        """Raise `ModelAlertError` if a model's last promotion is too long ago, or a job has waited too long."""

        alerts: list[object] = []
        if self.promoted_within is not None:
            alerts += jobs.stale_models(self.promoted_within, self.models)
        if self.started_within is not None:
            alerts += jobs.waiting_jobs(self.started_within)
        if alerts:
            raise ModelAlertError([str(alert) for alert in alerts])


class PromoteModelOperator(LabelledOperator):
    """Operator that promotes a version that waits for a decision, if it is better than the champion.

    A training with ``register: {promote: false}`` registers such a version. Put this task after Airflow's
    ``ApprovalOperator``. The version is compared with the champion of this moment, on the holdout of the training (see
    `shoal.models.promote_model`). A version that is not better is not promoted, and the task succeeds. A task that runs
    again returns the earlier decision.

    If the version is promoted, the task adds an event of the model's asset, which can trigger other DAGs (see
    `shoal.airflow.results`). The task returns the `PromotionResult` as a dict. The comparison runs in the task's
    process, which needs the library of the model, MLflow and the holdout.

    :param training: Result of the training task, such as ``train.output``, or the id of the training's job. (templated)
    :param model: Name of the registered model, together with `version`; instead of `training`. (templated)
    :param version: Version number. (templated)
    :param tracking_uri: URI of the MLflow server or database. By default, that of the training, that of the environment
        variable MLFLOW_TRACKING_URI, or else the database in ``$SHOAL_HOME``. (templated)
    :param credential_conn_ids: Ids of connections whose credentials the task uses, for storage and MLflow (see
        `shoal.airflow.hooks`).
    """

    template_fields: Sequence[str] = ("training", "model", "version", "tracking_uri")
    template_fields_renderers = {"training": "json"}  # noqa: RUF012 - Airflow's own shape

    def __init__(
        self,
        *,
        training: Mapping[str, Any] | XComArg | str | None = None,
        model: str | None = None,
        version: str | int | None = None,
        tracking_uri: str | None = None,
        credential_conn_ids: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.outlets = [*self.outlets, PROMOTIONS]
        self.training = training
        self.model = model
        self.version = version
        self.tracking_uri = tracking_uri
        self.credential_conn_ids = credential_conn_ids
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check at parse time that the arguments name one version."""
        training, model, version = (arguments[name] for name in ("training", "model", "version"))
        if training is None and None in (model, version):
            raise InvalidArgumentError(
                "the task names no version: give training=train.output, or both model and version"
            )
        given = [one is not None and one is not UNKNOWN for one in (training, model, version)]
        if given[0] and any(given[1:]):
            raise InvalidArgumentError("training is given together with model or version: give only one of both")

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> dict[str, Any]:
        """Promote the version if it is better than the champion, and return the `PromotionResult` as a dict."""
        from shoal.models import promote_model

        try:
            with (
                variables_set(environment_of(self.credential_conn_ids)),
                acting_for(team_of(context, None, self.owner)),
            ):
                result = promote_model(
                    self.model,
                    self.version,
                    training=cast("Training | None", self.training),
                    tracking_uri=self.tracking_uri,
                    holder=holder_of(context),
                    connection_url=database_url,
                    on_log=self.log.info,
                )
        except ShoalError as error:
            record_failure(context, self.job_label, error)
            raise
        record_success(context, result.model_name, result)
        return result.to_dict()

    @property
    def job_label(self) -> str:
        """The name of the model, as far as the arguments have it."""
        found = self.training.get("model_name") if isinstance(self.training, Mapping) else self.model
        return str(found or self.task_id)
