"""Define the spec of a job that predicts how many nodes of its pool a training needs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from shoal.jobs.spec import AnyJobSpec
from shoal.kinds.training.spec import JobSpec
from shoal.option_validation import optional
from shoal.training.demand import GangClaim, GangDemand
from shoal.training.gang.placement import GangShape
from shoal.training.run_config import RunConfig
from shoal.training.tracking import Tracking


class PlanJobSpec(AnyJobSpec):
    """Spec of a job that predicts on its pool's head how many nodes a training needs, and starts no workers.

    Example:
        >>> PlanJobSpec.of(training).on_pool("retrain")
    """

    framework: Literal["plan"] = Field(default="plan", description="Kind of the job; the value marks a plan.")
    training: JobSpec = Field(description="The boosting training.")
    model: str | None = optional("Registered model whose earlier trainings correct the prediction. None: no model.")
    tracking: Tracking | None = optional("A plan records nothing in MLflow.")

    @classmethod
    def of(cls, training: JobSpec) -> Self:
        """Build the spec of the plan of a training, which reads neither its holdout nor its user's code, and expects
        nothing of its rows."""
        config = training.run_config
        kept = {name: getattr(config, name) for name in ("artifact_location", "env", "secret_env", "priority")}
        needless = {"register_as": None, "user_code": None, "run_config": RunConfig()}
        planned = training.model_copy(update=needless).with_datasets(
            lambda dataset: dataset.model_copy(update={"expect": None})
        )
        fields = {"training": planned, "model": training.registered_model}
        return cls.model_validate({**fields, "run_config": RunConfig(**kept)})

    def demand(self) -> GangDemand:
        """Return that the job needs no nodes beside the head."""
        nothing = GangClaim(workers=0, cpus=0)
        return GangDemand(nothing, lambda nodes, clamp: GangShape(0, 0), self.run_config, tuple(self.inputs()))

    def _subject(self) -> str:
        """Return the training whose nodes are planned."""
        return f"nodes for {self.model or self.training.label}"
