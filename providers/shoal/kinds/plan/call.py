"""Plan the number of nodes in a job, from the process that scales or leases, and read the result of such a job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import func, select

from shoal.errors import InvalidArgumentError
from shoal.jobs.kind import KindCall
from shoal.jobs.results import JobResult
from shoal.jobs.spec import AnyJobSpec
from shoal.jobs.submission import submit
from shoal.kinds.plan.spec import PlanJobSpec
from shoal.kinds.task_spec import spec_of
from shoal.kinds.training.pool_plan import has_trained, plannable
from shoal.pool.api import ComputePool
from shoal.state import Store
from shoal.state.schema import Job, Usage
from shoal.training.locations import Claim

log = logging.getLogger("shoal.pool")


def planned_size(pool: ComputePool, plan_for: Any, on_log: Callable[[str], Any] = log.info, **submission: Any) -> int:
    """Return the smallest number of nodes on which a training fits, as a job on the pool's head predicts it.

    For a job that cannot be predicted, return the number of nodes that its last successful run on the pool has used.

    Args:
        pool: The pool, which is up.
        plan_for: Spec of the training, or its fields.
        on_log: Function that is called with each line of the job's log, one of which is the reasoning. Default: a
            logger of Python.
        submission: Further arguments of `submit`, such as the engine's task, whose tries share the plan.

    Raises:
        InvalidArgumentError: The job cannot be predicted, and no earlier run is known.
        JobFailedError: The training fits on no size of the pool, or its data cannot be used.
    """
    spec = spec_of(plan_for)
    try:
        training = plannable(spec, pool.settings())
    except InvalidArgumentError:
        if (nodes := _nodes_of_last_run(spec, pool.name)) is None:
            raise
        on_log(f'pool "{pool.name}": {nodes} node(s), as many as the last run of {spec.label} has used')
        return nodes
    spec, asked_by = PlanJobSpec.of(training).on_pool(pool.name), {"holder": pool.holder, "team": pool.team}
    plan = submit(spec, **{**asked_by, **submission}).wait(on_log=on_log).plan or {}
    return max(int(plan["chosen"]), pool.describe().min_nodes)


def _nodes_of_last_run(spec: AnyJobSpec, pool: str) -> int | None:
    runs = select(Job.id, Job.attempt).where(*has_trained(spec), Job.pool == pool)
    last = runs.order_by(Job.created_at.desc()).limit(1).subquery()
    with Store().reading() as session:
        used = select(func.max(Usage.nodes)).join(last, Usage.job_id == last.c.id)
        return session.scalar(used.where(Usage.attempt == last.c.attempt))


class PlanCall(KindCall[PlanJobSpec, None, dict[str, Any]]):
    """A plan, which has no code and writes no files."""

    def read(self, result: JobResult, location: str | None) -> dict[str, Any]:
        """Return the plan as plain data."""
        return result.plan or {}

    def run_here(self, env: Mapping[str, str], claim: Claim) -> dict[str, Any]:
        """Refuse: a connected Ray cluster is no pool."""
        raise InvalidArgumentError("the nodes of a connected Ray cluster cannot be planned: name a pool")
