"""Operator that promotes a registered version that waits for a decision, for example when a person has approved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import XComArg

from shoal.airflow._run_holder import holder_of, team_of
from shoal.airflow.assets import PROMOTIONS
from shoal.airflow.base.labelled import LabelledOperator
from shoal.airflow.checks import UNKNOWN, Arguments
from shoal.airflow.credentials import environment_of
from shoal.airflow.database_urls import database_url
from shoal.airflow.operators.outcomes import record_failure, record_promotion
from shoal.airflow.retries import no_retry_of_permanent_errors
from shoal.environment_variables import variables_set
from shoal.errors import InvalidArgumentError, ShoalError
from shoal.pool.teams import acting_for

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs.mlflow.later_promotion import Training


class PromoteModelOperator(LabelledOperator):
    """Operator that promotes a version that waits for a decision, if it is better than the champion.

    A training with ``register: {promote: false}`` registers such a version. Put this task after Airflow's
    ``ApprovalOperator``. The version is compared with the champion of this moment, on the holdout of the training (see
    `shoal.jobs.promote_model`). A version that is not better is not promoted, and the task succeeds. A task that runs
    again returns the earlier decision.

    If the version is promoted, the task adds an event of the model's asset, which can trigger other DAGs (see
    `shoal.airflow.assets`). The task returns the `PromotionResult` as a dict. The comparison runs in the task's
    process, which needs the library of the model, MLflow and the holdout.

    :param training: Result of the training task, such as ``train.output``, or the id of the training's job. (templated)
    :param model: Name of the registered model, together with `version`; instead of `training`. (templated)
    :param version: Version number. (templated)
    :param tracking_uri: URI of the MLflow server or database. By default, that of the training, that of the environment
        variable MLFLOW_TRACKING_URI, or else the database in ``$SHOAL_HOME``. (templated)
    :param credential_conn_ids: Ids of connections whose credentials the task uses, for storage and MLflow (see
        `shoal.airflow.credentials`).
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
        """Check at parse time that the arguments name one version.

        :param arguments: Arguments of the constructor.
        """
        training, model, version = (arguments[name] for name in ("training", "model", "version"))
        if training is None and None in (model, version):
            raise InvalidArgumentError(
                "the task names no version: give training=train.output, or both model and version"
            )
        if _is_given(training) and (_is_given(model) or _is_given(version)):
            raise InvalidArgumentError("training is given together with model or version: give only one of both")

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> dict[str, Any]:
        """Promote the version if it is better than the champion, and return the `PromotionResult` as a dict."""
        from shoal.jobs import promote_model

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
        record_promotion(context, result)
        return result.to_dict()

    @property
    def job_label(self) -> str:
        """The name of the model, as far as the arguments have it."""
        found = self.training.get("model_name") if isinstance(self.training, Mapping) else self.model
        return str(found or self.task_id)


def _is_given(argument: Any) -> bool:
    return argument is not None and argument is not UNKNOWN
