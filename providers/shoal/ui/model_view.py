"""Read registered models for the web page. The champions come from the store, and the versions from MLflow's HTTP API.

The package `mlflow` is not imported, because the import takes seconds and needs memory in the server that serves the
page, such as Airflow's API server.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx

from shoal.errors import ModelNotFoundError
from shoal.jobs.mlflow_run import JOB_TAG
from shoal.jobs.register import DEFAULT_ALIAS
from shoal.links import Link, model_link, web_address
from shoal.models.catalog import VersionStatus, version_status
from shoal.models.ledger import confirmed_promotions
from shoal.models.registry import ALIAS_TAG, is_ours
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.home import is_own_store
from shoal.state.schema import Promotion
from shoal.ui import formats

_KEPT_S = 15.0
"""Seconds for which an answer of MLflow is cached for all viewers."""

_ANSWER_S = 5.0

_PER_REQUEST = 1_000
_MOST_REQUESTS = 20
"""Largest number of HTTP requests for reading one list (of models or of versions) from MLflow."""

_MOST_VERSIONS = 200
"""Largest number of versions that the page of a model shows."""


@dataclass(frozen=True)
class Model:
    """A registered model: its champion, its versions, and the promotions that the store has recorded.

    Attributes:
        name: Name of the model.
        alias: Alias of the champion.
        champion: Number of the version that has the alias; None if no version has it.
        versions: Versions that shoal has registered, the newest first. Empty if MLflow has no web address.
        promotions: Promotions that the store has recorded, the newest first.
        note: Reason why the versions could not be read; None if they were read.
        link: Link to the model in MLflow.
    """

    name: str
    alias: str
    champion: str | None
    versions: tuple[VersionStatus, ...]
    promotions: tuple[Promotion, ...]
    note: str | None
    link: Link | None

    @property
    def metric(self) -> str | None:
        """Return the name of the metric that decides on promotions. The name comes from the newest version that has a
        metric, else from the recorded promotions."""
        named = [version.metric for version in self.versions if version.metric]
        return next(iter(named or [each.metric for each in self.promotions]), None)

    @property
    def champion_value(self) -> float | None:
        """Return the metric value with which the champion was promoted; None if the value is not known."""
        values = [version.value for version in self.versions if version.version == self.champion]
        values += [each.value for each in self.promotions if each.version == self.champion]
        return next((value for value in values if value is not None), None)

    @property
    def champion_since(self) -> float | None:
        """Return the time of the champion's promotion, or of its registration if no promotion is recorded."""
        times = [each.confirmed_at for each in self.promotions if each.version == self.champion]
        times += [version.created_at for version in self.versions if version.version == self.champion]
        return times[0] if times else None

    @property
    def plot(self) -> dict[str, Any] | None:
        """Return the data for the plot of the metric over time; None if there are fewer than two values."""
        rows: list[tuple[float, float, str, bool]]
        rows = [
            (version.created_at, version.value, version.version, bool(version.promoted))
            for version in self.versions
            if version.value is not None and version.metric == self.metric
        ] or [(each.created_at, each.value, each.version, True) for each in self.promotions if each.value is not None]
        rows = sorted(row for row in rows if math.isfinite(row[1]))  # JSON has no NaN
        if len(rows) < 2:
            return None
        return {
            "kind": "model",
            "metric": self.metric,
            "times": [formats.iso(at) for at, _, _, _ in rows],
            "values": [value for _, value, _, _ in rows],
            "versions": [version for _, _, version, _ in rows],
            "promoted": [promoted for _, _, _, promoted in rows],
        }


class Models:
    """Reader of registered models. The models are read at most every 15 s, and all viewers share the result."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: tuple[float, dict[str, Model], str | None] | None = None
        self._number = 0

    @property
    def version(self) -> int:
        """Return a number that increases each time the models are read."""
        self._read()
        return self._number

    def listed(self) -> Mapping[str, Any]:
        """Return all models in alphabetical order. If their versions could not be read, also return the reason."""
        models, note = self._read()
        return {"all": [models[name] for name in sorted(models)], "note": note}

    def described(self, name: str) -> Model:
        """Return the registered model with the given name.

        Raises:
            ModelNotFoundError: shoal has registered no version of a model with this name.
        """
        models, note = self._read()
        if name not in models:
            raise ModelNotFoundError(
                f'the model "{name}" does not exist: choose a model from the list of models'
                + (f"; {note}" if note else "")
            )
        return models[name]

    def _read(self) -> tuple[dict[str, Model], str | None]:
        with self._lock:
            if self._kept is None or self._clock() - self._kept[0] >= _KEPT_S:
                models, note = self._read_again()
                self._kept = (self._clock(), models, note)
                self._number += 1
            return self._kept[1], self._kept[2]

    def _read_again(self) -> tuple[dict[str, Model], str | None]:
        promotions: dict[str, list[Promotion]] = {}
        for promotion in confirmed_promotions(self._store):
            promotions.setdefault(promotion.model, []).append(promotion)
        # The server of this process may have the models of other teams.
        uri = os.environ.get("MLFLOW_TRACKING_URI") if is_own_store() else None
        base, note = web_address(uri), None
        versions: dict[str, list[Any]] = {}
        aliases: dict[str, dict[str, str]] = {}
        if uri is None or base is None:
            note = (
                "challengers are shown only if MLFLOW_TRACKING_URI is the address of an MLflow server (http:// or "
                "https://), and not on the page of a team with a store of its own: the champions are those that the "
                "store has recorded"
            )
        else:
            try:
                versions, aliases = _ask(uri)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
                note = redact(
                    f"MLflow at {base} gives no answer ({str(error) or type(error).__name__}): the champions are those "
                    "that shoal's store has recorded"
                )
        models = {}
        for name in {*versions, *promotions}:
            own, promoted = versions.get(name, []), promotions.get(name, [])
            newest = own[0].tags.get(ALIAS_TAG) if own else None
            alias = newest or (promoted[0].alias if promoted else DEFAULT_ALIAS)
            recorded = next((each.version for each in promoted if each.alias == alias), None)
            models[name] = Model(
                name=name,
                alias=alias,
                champion=aliases[name].get(alias) if name in aliases else recorded,
                versions=tuple(version_status(version, promoted) for version in own[:_MOST_VERSIONS]),
                promotions=tuple(each for each in promoted if each.alias == alias),
                note=note,
                link=model_link(uri, name),
            )
        return models, note


def _ask(uri: str) -> tuple[dict[str, list[Any]], dict[str, dict[str, str]]]:
    """Return the model versions that shoal has registered on an MLflow server, the newest first, and the aliases of
    these models."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    with httpx.Client(
        base_url=f"{uri.rstrip('/')}/api/2.0/mlflow/",
        timeout=_ANSWER_S,
        headers={"authorization": f"Bearer {token}"} if token else None,
        auth=(user, password) if user and password and not token else None,
    ) as client:
        versions: dict[str, list[Any]] = {}
        options = {"filter": f"tags.`{JOB_TAG}` LIKE '%'", "order_by": ["name ASC", "version_number DESC"]}
        for document in _found(client, "model-versions", options):
            version = SimpleNamespace(
                version=document["version"],
                creation_timestamp=int(document["creation_timestamp"]),
                run_id=document.get("run_id"),
                source=document.get("source"),
                tags={tag["key"]: tag["value"] for tag in document.get("tags", [])},
            )
            if is_ours(version):
                versions.setdefault(document["name"], []).append(version)
        aliases = {
            document["name"]: {each["alias"]: str(each["version"]) for each in document.get("aliases", [])}
            for document in _found(client, "registered-models", {})
        }
    for found in versions.values():
        found.sort(key=lambda version: -int(version.version))
    return versions, {name: aliases.get(name, {}) for name in versions}


def _found(client: httpx.Client, kind: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    token: str | None = None
    for _ in range(_MOST_REQUESTS):
        page: dict[str, Any] = {"max_results": _PER_REQUEST, **({"page_token": token} if token else {})}
        answer = client.get(f"{kind}/search", params=dict(options) | page).raise_for_status().json()
        yield from answer.get(kind.replace("-", "_"), [])
        token = answer.get("next_page_token")
        if not token:
            return
