"""Define `RunConfig`, the options of a run that all estimators and distributors accept."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from shoal.settings import Settings
from shoal.training.locations import resolved


class RunConfig(Settings):
    """Options of a run: its pool, its limits and the folder for its results.

    All estimators and distributors accept the same options.

    Example:
        >>> from shoal import RunConfig
        >>> RunConfig(pool_name="retrain", seed=7, timeout=3600)
    """

    pool_name: str | None = Field(
        default=None,
        description="Name of the pool that runs the training. None: inside a job the pool of that job, otherwise the "
        "pool named by $SHOAL_POOL, otherwise the only pool that is up.",
    )
    job_id: str | None = Field(
        default=None,
        min_length=1,
        description="Id of the job. A second call with the same id attaches to the job instead of starting another "
        "one. None: each call creates a new id.",
    )
    max_restarts: int = Field(
        default=0,
        ge=0,
        description="Number of times that a training may continue from its last checkpoint after a worker was lost. "
        "With the default 0, the first lost worker ends the training with an error.",
    )
    min_workers: int | None = Field(
        default=None,
        ge=1,
        description="Minimum number of workers with which the training may continue after a worker was lost. None: "
        "the training continues only with as many workers as before, which gives the same model.",
    )
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="Number of boosting rounds between two checkpoints. None: 50 rounds, or a quarter of all rounds "
        "if that is more.",
    )
    artifact_location: str | None = Field(
        default=None,
        description="Directory or URI for models and results. A relative path starts at the caller's working "
        "directory. None: the default location of the pool.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed for the division of the rows among the workers, and for the boosting library unless "
        "`params` contains a seed.",
    )
    clamp: bool = Field(
        default=False,
        description="Whether to reduce a request for more workers or CPUs than the active nodes have, and to warn. "
        "With the default False, such a request is refused with an error.",
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Maximum time of the training in seconds, from the call to the result. None: no limit. Before the"
        " training starts, a job may additionally wait for free resources on its pool for the same time.",
    )
    orphan_after: float | None = Field(
        default=900.0,
        gt=0,
        description="Time in seconds after which the job ends itself if no process has asked for its state. None: the"
        " job never ends for this reason.",
    )

    priority: int = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Priority among the jobs that wait for free resources on the pool. Jobs with a higher number "
        "start first.",
    )

    @model_serializer(mode="wrap")
    def _without_default_priority(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the options as a dict that lacks `priority` if it is the default, to keep earlier jobs' fingerprints.

        Jobs without a priority then have the same stored document and fingerprint as before the option existed.
        """
        fields: dict[str, Any] = serialize(self)
        if not self.priority:
            fields.pop("priority", None)
        return fields

    @field_validator("artifact_location")
    @classmethod
    def _absolute(cls, location: str | None) -> str | None:
        return resolved(location) if location else location
