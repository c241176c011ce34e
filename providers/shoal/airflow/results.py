"""Store why a task has no result, and collect the results of training tasks, or the causes why they have none."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import get_current_context
from airflow.sdk.configuration import conf

from shoal.links import task_link

if TYPE_CHECKING:
    from shoal.jobs import NoResult

log = logging.getLogger(__name__)

CAUSE = "shoal_cause"
"""Key of the XCom in which a task of shoal stores the reason if it failed or was skipped."""

_NOT_MAPPED = -1
"""Map index that Airflow gives to a task that is not mapped."""

_NEVER_RAN = ("upstream_failed", "removed", None)
"""States of instances that have not run. The reason is in the tasks before them."""

_MOST_CAUSES = 3


def store_cause(cause: str) -> None:
    """Store why the task fails or is skipped as an XCom, for later tasks and for messages. Outside a task, do nothing.

    :param cause: The reason.
    """
    try:
        ti = get_current_context()["ti"]
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
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=list(task_ids)).get(ti.run_id, {})

    def result_of(task_id: str, index: int) -> dict[str, Any] | NoResult:
        # If an upstream task has failed, Airflow does not expand the mapped task into instances. An unexpanded mapped
        # task has a single state.
        state = states.get(f"{task_id}_{index}" if index >= 0 else task_id) or states.get(task_id)
        if state == "success":
            result: dict[str, Any] = ti.xcom_pull(task_id, map_indexes=index)
            return result
        return NoResult(why_no_result(ti, context["dag"], task_id, index, state), skipped=state == "skipped")

    indexes = [_NOT_MAPPED] if mapped is None else range(mapped)
    return [result_of(task_id, index) for task_id in task_ids for index in indexes]


def why_no_result(ti: Any, dag: Any, task_id: str, index: int, state: str | None) -> str:
    """Return why a task instance has no result: the cause that it has stored, else the failures before it.

    :param ti: Any task instance of the run.
    :param dag: The DAG.
    :param task_id: Id of the task.
    :param index: Map index of the instance; -1 if the task is not mapped.
    :param state: State of the instance.
    """
    cause: str | None = ti.xcom_pull(task_ids=task_id, key=CAUSE, map_indexes=index)
    if cause:
        return cause
    if state in _NEVER_RAN and (found := sorted(_failures_before(ti, dag, task_id))):
        more = f"; and {len(found) - _MOST_CAUSES} more" if len(found) > _MOST_CAUSES else ""
        return "; ".join(found[:_MOST_CAUSES]) + more
    ended = f"ended as {state}" if state else "has not run"
    return f"task {instance_name(task_id, index)} {ended}: {_where_log(ti, task_id, index)}"


def _failures_before(ti: Any, dag: Any, task_id: str) -> Iterator[str]:
    """Yield a sentence for each failed instance among the tasks before a task."""
    before = [task.task_id for task in dag.get_task(task_id).get_flat_relatives(upstream=True)]
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=before).get(ti.run_id, {})
    for each in before:
        for index in instances_of(each, states, before):
            if states.get(each if index < 0 else f"{each}_{index}") == "failed":
                cause = ti.xcom_pull(task_ids=each, key=CAUSE, map_indexes=index)
                yield f"task {instance_name(each, index)} failed: {cause or _where_log(ti, each, index)}"


def instances_of(task_id: str, states: Mapping[str, Any], task_ids: Collection[str]) -> list[int]:
    """Return the map indexes of a task's instances in order; ``[-1]`` if the task is not mapped or not expanded.

    Airflow names the instances of a mapped task ``<task id>_<map index>``. A name that is the id of another task of the
    DAG, such as "train_1" beside "train", is not an instance.

    :param task_id: Id of the task.
    :param states: States of instances by name.
    :param task_ids: Ids of all tasks to which the states belong.
    """
    names = [name for name in states if name not in task_ids]
    mapped = [name.rpartition("_")[2] for name in names if name.rpartition("_")[0] == task_id]
    indexes = sorted(int(index) for index in mapped if index.isdigit())
    return indexes or ([_NOT_MAPPED] if task_id in states else [])


def instance_name(task_id: str, index: int) -> str:
    """Return a task instance as a text, such as ``train[3]``.

    :param task_id: Id of the task.
    :param index: Map index; -1 if the task is not mapped.
    """
    return task_id if index < 0 else f"{task_id}[{index}]"


def _where_log(ti: Any, task_id: str, index: int) -> str:
    link = task_link(conf.get("api", "base_url", fallback=None), ti.dag_id, ti.run_id, task_id, index)
    return f"see its log, {link.address}" if link else "see its log"
