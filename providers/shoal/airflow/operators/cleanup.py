"""Operators that cancel the jobs and release the leases of one DAG run, or of all DAG runs that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowRuntimeError

from shoal.airflow._run_holder import ENGINE, run_of
from shoal.airflow.base.pool import PoolOperator
from shoal.airflow.retries import no_retry_of_permanent_errors

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

_ENDED = ("success", "failed")


class CleanupPoolOperator(PoolOperator):
    """Operator that cancels the jobs and releases the lease of a DAG run on a pool.

    ``pool_for_run`` uses this operator as its teardown task. After the release, the operator ends nodes on this host
    that no lease and no base demand needs, and records the end of lost jobs.

    :param holder: Name of the holder whose jobs and lease are ended: ``airflow:<dag_id>/<run_id>``. By default, the
        holder of this DAG run. (templated)
    :param pool_name: Name or URI of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "holder")

    def __init__(self, *, holder: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.holder = holder
        self.check(self.task_id, vars(self))

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> dict[str, Any]:
        """Clean up after the DAG run, and return a report as a dict (see `shoal.jobs.clean_up`). A repeated call,
        for example in a retry, does no harm."""
        from shoal.jobs import clean_up

        report = clean_up(self.hook.pool().name, self.holder or self.holder_in(context))
        self.log.info("cancelled jobs: %s; lease released: %s", list(report.cancelled) or "none", report.released)
        for line in (*report.swept, *report.left):
            self.log.info(line)
        return report.to_dict()


class SweepPoolsOperator(BaseOperator):
    """Operator that cleans up after all ended DAG runs, on every pool of this host. Use this operator in a DAG that
    runs periodically.

    The operator cancels the jobs and releases the leases of DAG runs that have ended. Then the operator ends nodes on
    this host that no lease and no base demand needs, and records the end of lost jobs. A run that this Airflow does not
    know may belong to another Airflow deployment. So the operator does not change the jobs and leases of an unknown
    run. These leases expire when they are no longer renewed.
    """

    @no_retry_of_permanent_errors()
    def execute(self, context: Context) -> list[str]:
        """Clean up after ended DAG runs, and return a list with one sentence for each action."""
        from shoal.jobs.cleanup import clean_up_ended_runs, sweep

        def why_ended(run: str) -> str | None:
            dag_id, slash, run_id = run_of(run).partition("/")
            # A holder name that `holder_of` has made always contains a slash. A holder name without a slash was chosen
            # by a user, and belongs to no DAG run.
            if not slash:
                return None
            try:
                state = context["ti"].get_dagrun_state(dag_id, run_id)
            except AirflowRuntimeError:
                return None
            return f"its DAG run ended as {state}" if state in _ENDED else None

        did = [*clean_up_ended_runs(ENGINE, why_ended), *sweep()]
        for line in did:
            self.log.info(line)
        return did
