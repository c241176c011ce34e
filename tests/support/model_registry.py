"""A real MLflow registry with versions as jobs register them: of any age, with or without alias and promotion."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import Any

import mlflow

from shoal.jobs.journal.attempts import Key
from shoal.models.ledger import Ledger
from shoal.state import Store
from shoal.state.schema import Job, Promotion, PromotionState

DAY = 24 * 3600.0


def add_promotion(registry: str, model: str, version: str, **columns: Any) -> None:
    """A row of a confirmed promotion; without an attempt if the store does not have the job."""
    now = time.time()
    with Store().transaction() as session:
        if session.get(Job, (columns.get("job_id", "job"), columns.get("attempt", 1))) is None:
            columns["attempt"] = None
        session.add(
            Promotion(
                **{
                    "registry_uri": registry,
                    "model": model,
                    "alias": "champion",
                    "version": version,
                    "metric": "rmse",
                    "value": 0.5,
                    "holdout_digest": "d" * 32,
                    "job_id": "job",
                    "attempt": 1,
                    "state": PromotionState.CONFIRMED,
                    "created_at": now,
                    "confirmed_at": now,
                    **columns,
                }
            )
        )


class Shelf:
    """A registry in a SQLite database, in which a test places versions."""

    def __init__(self, uri: str, artifacts: str) -> None:
        mlflow.set_tracking_uri(uri)
        self.uri = uri
        self.client = mlflow.MlflowClient(uri)
        self._experiment = self.client.create_experiment("models", artifact_location=artifacts)

    def add(
        self,
        model: str,
        *,
        days: float = 0,
        key: Key | None = Key("job", 1),  # noqa: B008
        alias: str | None = None,
        source: str | None = None,
        **tags: Any,
    ) -> str:
        """Register a version that is some days old; without a key it is a person's."""
        if model not in {each.name for each in self.client.search_registered_models()}:
            self.client.create_registered_model(model)
        source = source or self.client.create_logged_model(self._experiment, "model").model_uri
        if key is not None:
            tags |= {"shoal.job_id": key.job_id, "shoal.attempt": key.attempt}
        named = {name.replace("__", "."): str(value) for name, value in tags.items()}
        version = str(self.client.create_model_version(model, source, tags=named).version)
        self._age(model, version, days)
        if alias is not None:
            self.client.set_registered_model_alias(model, alias, version)
        return version

    def promote(self, model: str, version: str, **columns: Any) -> None:
        """Record that a version was promoted, without an alias in the registry."""
        add_promotion(self.client._registry_uri, model, version, **columns)

    def ledger(self, model: str, alias: str = "champion") -> Ledger:
        return Ledger(Store(), self.client._registry_uri, model, alias)

    def left(self, model: str) -> list[str]:
        """The versions that still exist, the oldest first."""
        found = self.client.search_model_versions(f"name = '{model}'")
        return sorted((str(version.version) for version in found), key=int)

    def source(self, model: str, version: str) -> str:
        return str(self.client.get_model_version(model, version).source)

    def has_files(self, source: str) -> bool:
        """Whether MLflow still has the logged model of a version."""
        try:
            return bool(self.client.get_logged_model(source.removeprefix("models:/")))
        except mlflow.MlflowException:
            return False

    def _age(self, model: str, version: str, days: float) -> None:
        then = int((time.time() - days * DAY) * 1000)
        with closing(sqlite3.connect(self.uri.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute(
                "UPDATE model_versions SET creation_time = ? WHERE name = ? AND version = ?", (then, model, version)
            )
