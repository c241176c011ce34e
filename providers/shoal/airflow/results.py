"""Collect the results of a mapped task, also those of its instances that failed or were skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import get_current_context

if TYPE_CHECKING:
    from shoal.jobs import NoResult

CAUSE = "shoal_cause"
"""Key of the XCom in which a training task that fails leaves the cause of its failure."""


def mapped_results(task_id: str, count: int) -> list[dict[str, Any] | NoResult]:
    """Return what each instance of a mapped training gave, in the order of the map indexes.

    Call it in a task with ``trigger_rule="all_done"`` after the trainings, and pass the list to `shoal.jobs.summary`.

    :param task_id: Id of the mapped task, with the ids of its task groups.
    :param count: Number of instances, which is the number of specs.
    :returns: For each instance its job's result as a dict, or a `NoResult` with the cause of its failure.
    """
    from shoal.jobs import NoResult

    ti = get_current_context()["ti"]
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=[task_id]).get(ti.run_id, {})

    def result_of(index: int) -> dict[str, Any] | NoResult:
        state = states.get(f"{task_id}_{index}") or states.get(task_id) or "not run"
        if state == "success":
            result: dict[str, Any] = ti.xcom_pull(task_id, map_indexes=index)
            return result
        cause = ti.xcom_pull(task_id, key=CAUSE, map_indexes=index)
        unknown = f"task {task_id} with map index {index} ended as {state}: see its log"
        return NoResult(cause or unknown, skipped=state == "skipped")

    return [result_of(index) for index in range(count)]
