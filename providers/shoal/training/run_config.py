"""Options of a run, for all estimators and distributors."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from shoal.settings import Settings
from shoal.training.locations import resolved


class RunConfig(Settings):
    """Pool, limits and places of a run; the same for all estimators and distributors.

    Example:
        >>> from shoal import RunConfig
        >>> RunConfig(pool_name="retrain", seed=7, timeout=3600)
    """

    pool_name: str | None = Field(
        default=None, description="Pool to train on; None: inside a job its own, $SHOAL_POOL, the only pool there is."
    )
    job_id: str | None = Field(
        default=None, min_length=1, description="Id of the job, to attach to it when asked again; None: a fresh one."
    )
    max_restarts: int = Field(
        default=0, ge=0, description="How often a training may resume from its last checkpoint after a worker was lost."
    )
    min_workers: int | None = Field(
        default=None,
        ge=1,
        description="Fewest workers to resume with after a loss; None: as many as before, which gives the same model.",
    )
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="Rounds between two checkpoints; None: 50, or a quarter of the rounds where that is more.",
    )
    artifact_location: str | None = Field(
        default=None,
        description="Directory or URI for models and results, a relative one from the caller's folder; None: the "
        "pool's default.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed of the plan of the data, and of the library unless its params name one.",
    )
    clamp: bool = Field(
        default=False,
        description="Reduce, with a warning, what is asked for beyond the active nodes, instead of refusing it.",
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that the training may take, from its call to its result; None: no limit. A job may wait "
        "as long for room on its pool before it starts.",
    )
    orphan_after: float | None = Field(
        default=900.0,
        gt=0,
        description="Seconds after which the job ends itself if no process has asked for it; None: never.",
    )

    priority: int = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Place among the jobs that wait for room on the pool: higher ones start first.",
    )

    @model_serializer(mode="wrap")
    def _without_default_priority(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the default, so that the documents and fingerprints of jobs without a priority stay the same."""
        fields: dict[str, Any] = serialize(self)
        if not self.priority:
            fields.pop("priority", None)
        return fields

    @field_validator("artifact_location")
    @classmethod
    def _absolute(cls, location: str | None) -> str | None:
        return resolved(location) if location else location
