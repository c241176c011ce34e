"""Store the outcome of a training task as XComs for notifications and later tasks, add an asset event if the model was
promoted, and end the task as skipped if the job has skipped its training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException

from shoal.airflow.assets import add_promotion
from shoal.airflow.results import store_cause

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import AnyJobSpec, JobResult, PromotionResult

log = logging.getLogger(__name__)

LINE = "shoal_line"
"""Key of the XCom in which a training task stores a line about its model for notifications: the fields of a `ModelLine`
as a dict."""


def record_success(context: Context, spec: AnyJobSpec, result: JobResult) -> None:
    """Store a line about a training as an XCom, for notifications. If the model was promoted, also add an asset event.

    An error is logged and not raised, because the training has succeeded.

    :param context: Airflow's context of the training task.
    :param spec: Spec of the job.
    :param result: Result of the job.
    """
    try:
        if result.promoted and (register := spec.register_as) is not None:
            add_promotion(context, register.model, register.alias, register.metric, result)
    except Exception:
        log.warning("the asset event about the promotion could not be added", exc_info=True)
    _push_line(context, spec, result)


def record_promotion(context: Context, result: PromotionResult) -> None:
    """Store a line about a promotion as an XCom, for notifications. If the version was promoted, also add an asset
    event.

    An error is logged and not raised, because the promotion is complete.

    :param context: Airflow's context of the task.
    :param result: Result of the promotion.
    """
    try:
        if result.promoted:
            add_promotion(context, result.model_name, result.alias, result.metric, result)
    except Exception:
        log.warning("the asset event about the promotion could not be added", exc_info=True)
    _push_line(context, result.model_name, result)


def skip_without_training(result: JobResult) -> None:
    """End the task as skipped if its job has skipped the training because rows and settings have not changed.

    The cause is stored as an XCom, so that a later task can report the cause (see `training_results`).

    :param result: Result of the job.
    :raises AirflowSkipException: The job has skipped its training.
    """
    if result.skipped:
        store_cause(result.skipped)
        raise AirflowSkipException(result.skipped)


def record_failure(context: Context, spec: AnyJobSpec | Mapping[str, Any] | str | None, error: Exception) -> None:
    """Store a line about a failed training or promotion as an XCom, for notifications.

    If an XCom cannot be stored, the error is only logged, so that the task still fails with the original error.

    :param context: Airflow's context of the task.
    :param spec: Spec of the job, its fields if they could not be parsed, or the name of the model.
    :param error: The cause of the failure.
    """
    _push_line(context, spec or {}, error)


def _push_line(
    context: Context, spec: AnyJobSpec | Mapping[str, Any] | str, outcome: JobResult | PromotionResult | Exception
) -> None:
    from shoal.jobs import ModelLine

    try:
        context["ti"].xcom_push(key=LINE, value=ModelLine.of(spec, outcome).to_dict())
    except Exception:
        log.warning("the outcome of the training could not be stored as an XCom for messages", exc_info=True)
