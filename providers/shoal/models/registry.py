"""Read, with few requests to MLflow's registry, the models and versions that shoal has registered."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from shoal.errors import MissingExtraError, RegistryError
from shoal.jobs import mlflow_run
from shoal.jobs.files.storage import default_uri
from shoal.jobs.journal.attempts import Key
from shoal.jobs.mlflow_run import ATTEMPT_TAG, JOB_TAG, answering, is_missing, legal_name, missing_ignored
from shoal.jobs.timeouts import REGISTRY_PATIENCE_S
from shoal.lazy_imports import mlflow
from shoal.secrets.redaction import redact_value
from shoal.state.databases import sqlite_file

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

# Names of tags of a registered version: the alias for which it was a challenger, the rule that decided whether it was
# promoted, and the decision in one sentence.
ALIAS_TAG = "shoal.alias"
REASON_TAG = "shoal.reason"
DECISION_TAG = "shoal.decision"

WITHDRAWN = "withdrawn"
"""Value of the tag with the rule (`REASON_TAG`) after the promotion of the version was withdrawn."""

_HOLDOUT = "holdout."
_DIGEST = ".digest"

_REGISTERED_BY_SHOAL = f"tags.`{JOB_TAG}` LIKE '%'"

_COPY = re.compile(r"models:/[^/]+/\d+")
"""Pattern of the source of a version that a person has copied from another version. MLflow copies the tags, too, so
that the tags alone do not show which versions shoal has registered."""

_MODELS_PER_REQUEST = 1000
_VERSIONS_PER_REQUEST = 5000
"""Number of versions per request. Databricks allows 10,000."""


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
    def read(cls, client: mlflow.MlflowClient, model: str, number: str) -> VersionId:
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


@dataclass(frozen=True)
class Registry:
    """Access to an MLflow model registry, to read its models and the versions that shoal has registered.

    Attributes:
        client: MLflow client.
        uri: URI of the model registry, without credentials, as it is in the store's records of promotions.
    """

    client: mlflow.MlflowClient = field(repr=False)  # the client may contain credentials, so `repr` omits it
    uri: str

    @classmethod
    def open(cls, tracking_uri: str | None = None) -> Registry | None:
        """Open the registry of a tracking server or database.

        Returns:
            The registry; None if no URI was named and there is no database in `$SHOAL_HOME` yet.

        Raises:
            MissingExtraError: MLflow is not installed.
            RegistryError: The server does not answer, or the database does not exist.
        """
        if not mlflow_run.available():
            raise MissingExtraError("mlflow", "mlflow")
        uri = mlflow_run.uri_of(tracking_uri)
        with answering(uri):
            if uri.startswith("sqlite:") and (file := sqlite_file(uri)) is not None and not file.exists():
                if uri == default_uri():
                    return None
                # A missing file is an error here, because MLflow would create an empty database in its place.
                raise RegistryError(f"the MLflow database {file} does not exist: correct the tracking URI")
            if uri.startswith(("http://", "https://")):
                _reach(uri)
            client = mlflow_run.connect(uri)
        return cls(client, redact_value(client._registry_uri))

    def versions(self, model: str | None = None) -> dict[str, list[ModelVersion]]:
        """Return a dict from each model's name to the versions that shoal has registered, the newest version first.

        MLflow reads about 1,400 versions per second, so that a year's versions of forty models take ten seconds.
        """
        where = _REGISTERED_BY_SHOAL if model is None else f"name = {quoted(model)} AND {_REGISTERED_BY_SHOAL}"
        found: dict[str, list[ModelVersion]] = {}
        with answering(self.uri):
            for version in _pages(
                self.client.search_model_versions,
                filter_string=where,
                max_results=_VERSIONS_PER_REQUEST,
                order_by=["name ASC", "version_number DESC"],
            ):
                if is_ours(version):
                    found.setdefault(version.name, []).append(version)
        return found

    def models(self) -> list[RegisteredModel]:
        """Return all registered models, also those of other programs, with their aliases and latest versions."""
        with answering(self.uri):
            return list(_pages(self.client.search_registered_models, max_results=_MODELS_PER_REQUEST))

    def model(self, name: str) -> RegisteredModel | None:
        """Return a registered model; None if the registry has no model of this name."""
        with answering(self.uri):
            try:
                return self.client.get_registered_model(name)
            except mlflow.MlflowException as error:
                # For a name that no model can have, such as a name with a slash, MLflow reports an invalid parameter.
                # The registry has no model of such a name.
                if is_missing(error) or error.error_code == "INVALID_PARAMETER_VALUE":
                    return None
                raise

    def newest(self, model: RegisteredModel, *, search: bool) -> ModelVersion | None:
        """Return the newest version that shoal has registered for a model, usually without a further request to MLflow.

        Returns:
            The version; None if there is none, or if it was not searched for.
        """
        latest = max(model.latest_versions or (), key=lambda version: int(version.version), default=None)
        if latest is not None and is_ours(latest):
            return latest
        return next(iter(self.versions(model.name).get(model.name, [])), None) if search else None

    def version(self, model: str, version: str) -> ModelVersion:
        """Return one version of a model, with its aliases."""
        with answering(self.uri):
            return self.client.get_model_version(model, version)


def newest_versions(client: mlflow.MlflowClient, model: str, limit: int) -> list[ModelVersion]:
    """Return the newest versions of a model, including versions that other programs have registered, the newest first.

    Raises:
        RegistryError: The model's name has both kinds of quotation marks.
    """
    found = client.search_model_versions(f"name = {quoted(model)}", max_results=limit, order_by=["version_number DESC"])
    # Some databases ignore case when they compare names, so the search may find versions of another model.
    return [version for version in found if version.name == model]


def metric_tag(metric: str) -> str:
    """Return the name of the tag in which a registered version has a metric's value on the holdout."""
    return _HOLDOUT + legal_name(metric)


def digest_tag(metric: str) -> str:
    """Return the name of the tag that contains the digest of the holdout.

    The name contains the metric's name. A version has the tag for one metric only: the one that decides about its
    promotion.
    """
    return metric_tag(metric) + _DIGEST


def holdout_metrics(tags: Mapping[str, str]) -> tuple[str | None, dict[str, float]]:
    """Read from a version's tags which metric decided about its promotion, and the values of all metrics.

    Returns:
        Name of the metric that decided, None if it is not recorded; and the values by name.
    """
    values, deciding = {}, None
    for name, text in sorted(tags.items()):
        if not name.startswith(_HOLDOUT):
            continue
        # The only character of a metric's name that MLflow refuses is the "@" before a number.
        metric = re.sub(r"_(?=[\d.]+$)", "@", name.removeprefix(_HOLDOUT).removesuffix(_DIGEST))
        if name.endswith(_DIGEST):
            deciding = metric
            continue
        # A tag whose text is not a number was written by another program or a person, so the metric is left out.
        with suppress(ValueError):
            values[metric] = float(text)
    return deciding, values


def aliases_of(model: RegisteredModel) -> dict[str, str]:
    """Return a dict from each alias of a model to the number of the version to which the alias points."""
    return {alias: str(version) for alias, version in model.aliases.items()}


def is_ours(version: ModelVersion) -> bool:
    """Return whether shoal has registered a version; False if another program has registered it, or if it is a copy."""
    return JOB_TAG in version.tags and not _COPY.fullmatch(version.source or "")


def attempt_of(version: ModelVersion) -> Key | None:
    """Return the attempt that has registered a version; None if the version's tags do not name one."""
    job_id, attempt = version.tags.get(JOB_TAG), version.tags.get(ATTEMPT_TAG, "")
    return Key(job_id, int(attempt)) if job_id and attempt.isdigit() else None


def quoted(text: str) -> str:
    """Put a text into quotation marks, so that a filter in MLflow's search can contain it.

    Raises:
        RegistryError: The text contains both kinds of quotation marks, and MLflow's search has no syntax for such a
            text.
    """
    for mark in "'\"":
        if mark not in text:
            return f"{mark}{text}{mark}"
    raise RegistryError(
        f"MLflow cannot search for {text}, because this text contains both ' and \": use only one of these characters"
    )


def _reach(uri: str) -> None:
    """Raise a `ConnectionError` with the first cause if an MLflow server does not answer."""
    import requests

    # Any answer shows that the server can be reached. The request contains no credentials, also none of ~/.netrc
    # (`auth`), so the server's certificate is not checked here. MLflow checks the certificate later.
    try:
        address = urlsplit(uri)
        without_credentials = urlunsplit(address._replace(netloc=address.netloc.rpartition("@")[2]))
        with warnings.catch_warnings(action="ignore"):
            requests.head(without_credentials, timeout=REGISTRY_PATIENCE_S, verify=False, auth=lambda request: request)
    except (requests.RequestException, ValueError) as error:
        cause: BaseException = error
        while cause.__context__ is not None:
            cause = cause.__context__
        raise ConnectionError(str(cause)) from error


def _pages(search: Callable[..., Any], **options: Any) -> Iterator[Any]:
    """Yield each result of a search in MLflow, which returns the results in pages."""
    token: str | None = None
    while True:
        page = search(**options, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
