"""Send Prefect events about trained models, stale models and waiting jobs.

Automations in Prefect can react to these events by sending a notification or running a deployment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from prefect.events import emit_event
from prefect.logging import get_run_logger

from shoal.errors import InvalidArgumentError
from shoal.jobs import (
    AnyJobSpec,
    JobResult,
    ModelLine,
    PromotionResult,
    stale_models,
    summary_message,
    waiting_jobs,
)
from shoal.prefect._run_holder import interrupt_of_task
from shoal.prefect.retries import is_retried

_EVENT = "shoal.model."
"""Prefix of the names of all events about models. The rest of a name is the outcome of a training, such as
``promoted``."""

_MODEL = "shoal.model."
"""Prefix of the resource ids of models. The rest of an id is the name of the registered model."""

_JOB = "shoal.job."
"""Prefix of the resource ids of jobs. The rest of an id is the id of the job."""


def emit_outcome(
    spec: AnyJobSpec | Mapping[str, Any] | str | None, outcome: JobResult | PromotionResult | Exception
) -> None:
    """Send the event about the outcome of a training or promotion: ``shoal.model.promoted``, ``.kept``, ``.waiting``,
    ``.trained``, ``.failed`` or ``.skipped``.

    An error while sending is logged and not raised, because it must not fail a task whose work has succeeded, and must
    not hide the cause of a failure.
    """
    try:
        line = ModelLine.of(spec or {}, outcome)
        message = summary_message([line])
        payload = {**line.to_dict(), "subject": message.subject, "text": message.text}
        if isinstance(outcome, JobResult | PromotionResult):
            result = outcome.to_dict()
            payload |= {name: result[name] for name in ("job_id", "model_uri", "metrics", "promoted")}
        emit_event(f"{_EVENT}{line.outcome}", _model(line.model), payload=payload)
    except Exception as error:
        get_run_logger().warning("the Prefect event about the training could not be sent: %s", error)


@contextmanager
def failure_event(spec: AnyJobSpec | Mapping[str, Any] | str | None) -> Iterator[None]:
    """Send the event ``shoal.model.failed`` if the ``with`` block raises an exception and Prefect does not retry the
    task.

    A run that is cancelled sends no event, because its end is not a failure of the training.
    """
    try:
        yield
    except Exception as error:
        interrupt = interrupt_of_task.get()
        is_cancelled = interrupt is not None and interrupt.is_requested
        if not is_cancelled and not is_retried(error):
            emit_outcome(spec, error)
        raise


def emit_alerts(
    *,
    promoted_within: timedelta | None = None,
    started_within: timedelta | None = None,
    models: Collection[str] | None = None,
) -> list[str]:
    """Send an event for each model whose last promotion is too long ago, and for each job that has waited too long.

    The events are ``shoal.model.stale`` and ``shoal.job.waiting``.

    Call this function in a flow that runs periodically. Each call sends the events again. To get one notification a
    day, give the automation's trigger ``within=timedelta(days=1)`` and ``for_each={"prefect.resource.id"}``.

    Args:
        promoted_within: Longest allowed time since a model's last promotion. None: promotions are not checked.
        started_within: Longest time that a job may wait in the queue of its pool. None: jobs are not checked.
        models: Names of the models to check; a model that was never trained is stale, too. None: all models that
            shoal's store knows.

    Returns:
        One sentence for each event.

    Raises:
        InvalidArgumentError: Both limits are missing, or a limit is not a positive duration.
    """
    if promoted_within is None and started_within is None:
        raise InvalidArgumentError("emit_alerts has nothing to check: give promoted_within, started_within or both")
    sentences = []
    for model in stale_models(promoted_within, models) if promoted_within is not None else ():
        payload = {"alias": model.alias, "version": model.version, "days": model.days, "text": str(model)}
        emit_event(f"{_EVENT}stale", _model(model.model), payload=payload)
        sentences.append(str(model))
    for job in waiting_jobs(started_within) if started_within is not None else ():
        resource = {"prefect.resource.id": f"{_JOB}{job.job_id}", "prefect.resource.name": job.job_id}
        payload = {"pool": job.pool, "holder": job.holder, "hours": job.hours, "text": str(job)}
        emit_event("shoal.job.waiting", resource, payload=payload)
        sentences.append(str(job))
    return sentences


def _model(name: str) -> dict[str, str]:
    return {"prefect.resource.id": f"{_MODEL}{name}", "prefect.resource.name": name}
