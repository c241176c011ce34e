"""Predict in a job's driver, on the pool's head, how many nodes a training needs."""

from __future__ import annotations

from shoal.errors import DataError
from shoal.jobs.driver.attempt_context import AttemptContext
from shoal.jobs.kind import KindDriver
from shoal.jobs.results import JobResult
from shoal.kinds.plan.spec import PlanJobSpec
from shoal.kinds.training.pool_plan import memory_of, plan_on
from shoal.pool.api import ComputePool
from shoal.pool.spec import PoolSpec
from shoal.training.host.imports import import_lean


class PlanDriver(KindDriver[PlanJobSpec, AttemptContext]):
    """A plan of the number of nodes."""

    def begin(self) -> None:
        """Import the library without scikit-learn, to check the parameters of the training."""
        import_lean([self.spec.training.framework])

    def work(self, place: AttemptContext) -> tuple[JobResult, None]:
        """Plan the training, and print the reasoning.

        Raises:
            DataError: The training fits on no size of the pool; or the data cannot be used for it.
        """
        pool = ComputePool(self.spec.run_config.pool_name, store=place.store, is_named=False)
        settings = PoolSpec.parse(pool.describe().uri)
        node = memory_of(settings, registers=self.spec.model is not None)
        found = plan_on(self.spec.training, settings, node, model=self.spec.model)
        if found.chosen is None:
            raise DataError(found.reasoning())
        print(found.reasoning(), flush=True)
        return place.result(model_path="", model_uri="", rows=found.rows, plan=found.to_dict()), None
