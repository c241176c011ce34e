"""How tasks of shoal ended: their results and causes, lines for messages, and events of the assets of promoted models.

Also here: errors that no retry can mend, such as a wrong argument, fail a task at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias, get_current_context
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from airflow.sdk.log import redact  # type: ignore[attr-defined]

from shoal.errors import InvalidArgumentError, ShoalError, shown
from shoal.links import task_link
from shoal.secrets.redaction import one_line

if TYPE_CHECKING:
    from airflow.sdk import RetryDecision
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import AnyJobSpec, JobResult, NoResult, PromotionResult


CHAMPION = "champion"
"""Default alias that a promotion moves to the new model version. The class `Register` has the same default, but DAG
files do not load that class."""

PROMOTIONS = AssetAlias("shoal-promotions")
"""Asset alias that is an outlet of every training task. A task whose model was promoted adds an event of the model's
asset to this alias. If a task adds no event, Airflow records none."""


def model_asset(model: str, alias: str = CHAMPION) -> Asset:
    """Return the asset of a registered model, ``Asset("shoal://models/MODEL")``. Each promotion updates it.

    For an alias other than ``champion``, the asset is ``Asset("shoal://models/MODEL@ALIAS")``. Characters of the names
    that a URI cannot contain are percent-encoded.

    :param model: Name of the model in MLflow's registry.
    :param alias: Alias in MLflow's registry that a promotion moves.
    """
    if not isinstance(model, str) or not model or any(mark in model for mark in "/:"):
        raise InvalidArgumentError(
            f'{shown(model)} is not a legal name for a registered model: use 1 to 250 characters without "/" and ":"'
        )
    return Asset(f"shoal://models/{quote(model, safe='')}" + ("" if alias == CHAMPION else f"@{alias}"))


def promotion_of(context: Context, model: str, alias: str = CHAMPION) -> dict[str, Any] | None:
    """Return the model promotion that triggered this DAG run; None if the run was triggered in another way.

    If several promotions have triggered the run together, the newest one is returned. A run that is cleared and runs
    again gets the same promotion, even if the model was promoted again since then.

    :param context: Airflow's context of a task of the run.
    :param model: Name of the model in MLflow's registry.
    :param alias: Alias that the promotion has moved.
    :returns: A dict with ``model``, ``alias``, ``version``, ``model_uri`` (``models:/MODEL/VERSION``), ``metric``,
        ``metrics``, ``decision``, ``reason``, ``job_id`` and ``previous_version`` (None if there was no champion).
    """
    try:
        events = context["triggering_asset_events"][model_asset(model, alias)]
    # A user, a schedule or another asset has triggered the DAG run, and not a promotion of this model.
    except KeyError:
        return None
    newest = max(events, key=lambda event: event.timestamp)
    return dict(newest.extra)


log = logging.getLogger(__name__)

CAUSE = "shoal_cause"
"""Key of the XCom in which a task of shoal stores the reason if it failed or was skipped."""

_NOT_MAPPED = -1
"""Map index that Airflow gives to a task that is not mapped."""

_NEVER_RAN = ("upstream_failed", "removed", None)
"""States of instances that have not run. The reason is in the tasks before them."""

_MOST_CAUSES = 3


def error_text(error: object) -> str:
    """Return an error as one line, without the secrets that Airflow knows, as in the task's log."""
    return one_line(str(redact(str(error) or type(error).__name__)))


def store_cause(cause: str, ti: Any = None) -> None:
    """Store why the task fails or is skipped as an XCom, for later tasks and messages. Outside a task, do nothing.

    :param ti: The task instance. None: that of the current context.
    """
    try:
        ti = ti or get_current_context()["ti"]
    except RuntimeError:
        return
    try:
        ti.xcom_push(key=CAUSE, value=cause)
    # The task must end with its own error, even if the cause cannot be stored.
    except Exception:
        log.warning("the cause of the failure or skip could not be stored as an XCom", exc_info=True)


def training_results(*task_ids: str, mapped: int | None = None) -> list[dict[str, Any] | NoResult]:
    """Return one entry for each training: the training's result, or the cause if the training failed or was skipped.

    Call this function in a task with ``trigger_rule="all_done"`` after the trainings, and pass the list to
    `shoal.jobs.summary`.

    :param task_ids: Ids of the training tasks, with the ids of their task groups.
    :param mapped: Number of instances of each mapped task. The results are in the order of the map indexes. By default,
        the tasks are not mapped.
    :returns: For each training, its job's result as a dict, or a `NoResult` with the cause why there is no result.
    """
    from shoal.jobs import NoResult

    context = get_current_context()
    ti = context["ti"]
    states = states_of(ti, task_ids)

    def result_of(task_id: str, index: int) -> dict[str, Any] | NoResult:
        # If an upstream task has failed, Airflow does not expand the mapped task into instances. An unexpanded mapped
        # task has a single state.
        state = states.get(state_key(task_id, index)) or states.get(task_id)
        if state == "success":
            return cast("dict[str, Any]", ti.xcom_pull(task_id, map_indexes=index))
        return NoResult(why_no_result(ti, context["dag"], task_id, index, state), skipped=state == "skipped")

    indexes = [_NOT_MAPPED] if mapped is None else range(mapped)
    return [result_of(task_id, index) for task_id in task_ids for index in indexes]


def why_no_result(ti: Any, dag: Any, task_id: str, index: int, state: str | None) -> str:
    """Return why a task instance has no result: the cause that it has stored, else the failures before it."""
    # An instance that has not run since it was cleared may still have the cause of an earlier run.
    if state not in (*_NEVER_RAN, "success") and (cause := cause_of(ti, task_id, index)):
        return cause
    if state in _NEVER_RAN and (found := sorted(_failures_before(ti, dag, task_id))):
        more = f"; and {len(found) - _MOST_CAUSES} more" if len(found) > _MOST_CAUSES else ""
        return "; ".join(found[:_MOST_CAUSES]) + more
    ended = f"ended as {state}" if state else "has not run"
    return f"task {instance_name(task_id, index)} {ended}: {where_log(ti, task_id, index)}"


def cause_of(ti: Any, task_id: str, index: int) -> str | None:
    """Return the cause that a task instance of the same run has stored; None if there is none."""
    return cast("str | None", ti.xcom_pull(task_ids=task_id, key=CAUSE, map_indexes=index))


def _failures_before(ti: Any, dag: Any, task_id: str) -> Iterator[str]:
    """Yield a sentence for each failed instance among the tasks before a task."""
    before = [task.task_id for task in dag.get_task(task_id).get_flat_relatives(upstream=True)]
    states = states_of(ti, before)
    for each in before:
        for index in instances_of(each, states, before):
            if states.get(state_key(each, index)) == "failed":
                cause = cause_of(ti, each, index) or where_log(ti, each, index)
                yield f"task {instance_name(each, index)} failed: {cause}"


def states_of(ti: Any, task_ids: Iterable[str]) -> Mapping[str, Any]:
    """Return the states of the instances of tasks in the DAG run of a task instance, by the names of `state_key`."""
    found = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=list(task_ids))
    return dict(found.get(ti.run_id, {}))


def state_key(task_id: str, index: int) -> str:
    """Return the name that Airflow gives to an instance among the states of a DAG run."""
    return task_id if index < 0 else f"{task_id}_{index}"


def instances_of(task_id: str, states: Mapping[str, Any], task_ids: Collection[str]) -> list[int]:
    """Return the map indexes of a task's instances in order; ``[-1]`` if the task is not mapped or not expanded.

    Airflow names the instances of a mapped task ``<task id>_<map index>``. A name that is the id of another task of the
    DAG, such as "train_1" beside "train", is not an instance.
    """
    names = [name for name in states if name not in task_ids]
    mapped = [name.rpartition("_")[2] for name in names if name.rpartition("_")[0] == task_id]
    indexes = sorted(int(index) for index in mapped if index.isdigit())
    return indexes or ([_NOT_MAPPED] if task_id in states else [])


def instance_name(task_id: str, index: int) -> str:
    """Return a task instance as a text, such as ``train[3]``."""
    return task_id if index < 0 else f"{task_id}[{index}]"


def where_log(ti: Any, task_id: str, index: int) -> str:
    """Return where the log of a task instance is, with its address if Airflow's configuration has one."""
    link = task_link(conf.get("api", "base_url", fallback=None), ti.dag_id, ti.run_id, task_id, index)
    return f"see its log, {link.address}" if link else "see its log"


try:
    from airflow.sdk import RetryPolicy
except ImportError:  # Airflow before 3.3 has no retry policies.
    RetryPolicy = object  # type: ignore[assignment,misc]


@contextmanager
def no_retry_of_permanent_errors() -> Iterator[None]:
    """Fail the task without a retry if the ``with`` block or the decorated method raises a permanent error.

    Permanent errors are a wrong argument, wrong data, and a request for more than the pool has. All other errors are
    raised unchanged, such as a lost worker, a pool that is down, or resources that did not become free in time. Any
    error of shoal is stored as an XCom, for messages and for `training_results`.

    :raises AirflowFailException: The error is permanent. The original error is the cause.
    """
    try:
        yield
    except (ShoalError, AirflowFailException) as error:
        store_cause(str(error))
        if isinstance(error, ShoalError) and error.permanent:
            raise AirflowFailException(str(error)) from error
        raise


class FailOnPermanentErrors(RetryPolicy):
    """Retry policy for your own tasks that call shoal: a permanent error fails the task at once.

    shoal's own operators do not need this policy. The policy needs Airflow 3.3 or later: ``@task(retries=3,
    retry_policy=FailOnPermanentErrors())``.
    """

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Decide whether the task is retried."""
        from airflow.sdk import RetryDecision

        if isinstance(exception, ShoalError) and exception.permanent:
            return RetryDecision.fail(f"a retry would fail in the same way: {exception}")
        return RetryDecision.default()


LINE = "shoal_line"
"""Key of the XCom in which a task stores its outcome for notifications: the fields of a `ModelLine` as a dict."""


def record_success(context: Context, spec: AnyJobSpec | str, result: JobResult | PromotionResult) -> None:
    """Store the outcome of a job or a promotion as an XCom, for notifications. If the model was promoted, also add an
    asset event.

    An error is logged and not raised, because the job or promotion has succeeded.

    :param spec: Spec of the job, or the name of the model that `PromotionResult` is about.
    """
    try:
        about: Any = result if isinstance(spec, str) else spec.register_as
        if result.promoted and about is not None:
            model = spec if isinstance(spec, str) else about.model
            # Airflow stores the event as JSON, which has no NaN, so `to_dict` converts NaN to text.
            plain = result.to_dict()
            decision, champion = plain["decision"] or {}, plain["champion"] or {}
            # Airflow records the event when the task succeeds.
            context["outlet_events"][PROMOTIONS].add(
                model_asset(model, about.alias),
                extra={
                    "model": model,
                    "alias": about.alias,
                    "version": result.model_version,
                    "model_uri": f"models:/{model}/{result.model_version}",
                    "metric": about.metric,
                    "metrics": plain["metrics"],
                    "decision": decision.get("sentence"),
                    "reason": decision.get("reason"),
                    "job_id": result.job_id,
                    "previous_version": champion.get("version"),
                },
            )
    except Exception:
        log.warning("the asset event about the promotion could not be added", exc_info=True)
    _push_line(context, spec, result)


def skip_without_training(result: JobResult) -> None:
    """End the task as skipped if its job has skipped the training because rows and settings have not changed.

    The cause is stored as an XCom, so that a later task can report the cause (see `training_results`).

    :raises AirflowSkipException: The job has skipped its training.
    """
    if result.skipped:
        store_cause(result.skipped)
        raise AirflowSkipException(result.skipped)


def record_failure(context: Context, spec: AnyJobSpec | Mapping[str, Any] | str | None, error: Exception) -> None:
    """Store the outcome of a failed job or promotion as an XCom, for notifications.

    If an XCom cannot be stored, the error is only logged, so that the task still fails with the original error.

    :param spec: Spec of the job, its fields if they could not be parsed, or the name of the model or task.
    """
    _push_line(context, spec or {}, error)


def _push_line(
    context: Context, spec: AnyJobSpec | Mapping[str, Any] | str, outcome: JobResult | PromotionResult | Exception
) -> None:
    from shoal.jobs import ModelLine

    try:
        context["ti"].xcom_push(key=LINE, value=ModelLine.of(spec, outcome).to_dict())
    except Exception:
        log.warning("the outcome of the task could not be stored as an XCom for messages", exc_info=True)
