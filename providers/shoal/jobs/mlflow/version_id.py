"""Identify a version of a registered model by more than its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.jobs.mlflow.registry import missing_ignored

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True)
class VersionId:
    """Identity of a version of a registered model.

    The number alone does not identify a version: a model that was deleted and registered again begins at number 1, and
    so does a new MLflow database at the same address.

    Attributes:
        number: Version number in MLflow's registry.
        created_at: Time at which the version was registered, in milliseconds since the epoch. None: the registry has no
            version of this number, or an older shoal has recorded only the number.
        run_id: Id of the MLflow run in which the version was trained. None: it has no run, or `created_at` is None.
    """

    number: str
    created_at: int | None = None
    run_id: str | None = None

    @classmethod
    def of(cls, version: ModelVersion) -> VersionId:
        """Return the identity of a version that was read from the registry."""
        return cls(str(version.version), int(version.creation_timestamp), version.run_id or None)

    @classmethod
    def read(cls, client: MlflowClient, model: str, number: str) -> VersionId:
        """Read the identity of a model's version from the registry, by the version's number."""
        found = cls(number)
        with missing_ignored():
            found = cls.of(client.get_model_version(model, number))
        return found

    @classmethod
    def recorded(cls, number: str, columns: dict[str, Any] | None) -> VersionId:
        """Return the identity that the store has recorded (see `columns`)."""
        return cls(number) if columns is None else cls(number, columns["created_at"], columns["run_id"])

    @property
    def columns(self) -> dict[str, Any]:
        """Return what the store records of the identity, besides the number."""
        return {"created_at": self.created_at, "run_id": self.run_id}

    @property
    def exists(self) -> bool:
        """Return whether the registry had the version when its identity was read."""
        return self.created_at is not None

    def __str__(self) -> str:
        return self.number
