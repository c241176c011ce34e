"""Collect the results of training tasks. For a task that failed or was skipped, collect the cause instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import get_current_context

if TYPE_CHECKING:
    from shoal.jobs import NoResult

CAUSE = "shoal_cause"
"""Key of the XCom in which a training task stores the reason if the training failed or was skipped."""

_NOT_MAPPED = -1
"""Map index that Airflow gives to a task that is not mapped."""


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

    ti = get_current_context()["ti"]
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=list(task_ids)).get(ti.run_id, {})

    def result_of(task_id: str, index: int) -> dict[str, Any] | NoResult:
        # If an upstream task has failed, Airflow does not expand the mapped task into instances. An unexpanded mapped
        # task has a single state.
        state = states.get(f"{task_id}_{index}" if index >= 0 else task_id) or states.get(task_id) or "not run"
        if state == "success":
            result: dict[str, Any] = ti.xcom_pull(task_id, map_indexes=index)
            return result
        cause = ti.xcom_pull(task_id, key=CAUSE, map_indexes=index)
        instance = f" with map index {index}" if index >= 0 else ""
        return NoResult(cause or f"task {task_id}{instance} ended as {state}: see its log", skipped=state == "skipped")

    indexes = [_NOT_MAPPED] if mapped is None else range(mapped)
    return [result_of(task_id, index) for task_id in task_ids for index in indexes]
