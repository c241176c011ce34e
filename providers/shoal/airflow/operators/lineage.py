"""What a job has read and written, as OpenLineage names it (https://openlineage.io/docs/spec/naming)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from shoal.jobs import AnyJobSpec, JobResult

MODELS = "shoal://models"
"""Namespace of registered models. Together with the name it is the URI of the model's asset in Airflow."""

_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
"""Other schemes of a storage, and the one that OpenLineage uses."""

_KEEPS_SLASH = ("hdfs", "webhdfs")
"""Storages whose paths begin with a slash. In the others, a path is the key of an object."""

_WILDCARD = re.compile(r"[*?\[]")

_VERSION = re.compile(r"models:/([^/@]+)/(\w+)")


class Named(NamedTuple):
    """A dataset by its name in OpenLineage, and its version, which only a registered model has."""

    namespace: str
    name: str
    version: str | None = None


def of_path(path: str) -> Named:
    """Return the name of a file or folder.

    The name of several files that a wildcard matches is that of the folder that contains them.

    :param path: Absolute path or URI.
    """
    if (wildcard := _WILDCARD.search(path)) is not None:
        path = path[: wildcard.start()].rpartition("/")[0]
    parts = urlsplit(path)
    if parts.scheme in ("", "file"):
        return Named("file", (unquote(parts.path) if parts.scheme else path).rstrip("/") or "/")
    scheme = _SCHEMES.get(parts.scheme, parts.scheme)
    name = parts.path.rstrip("/") if scheme in _KEEPS_SLASH else parts.path.strip("/")
    return Named(f"{scheme}://{parts.netloc}", name or "/")


def read_by(spec: AnyJobSpec, result: JobResult) -> Iterator[Named]:
    """Yield what a job has read: its files, and the model of a prediction. Rows of a database, and copies of rows that
    were staged for the job, have no name.

    :param spec: Spec of the job, as it was submitted.
    :param result: Result of the job.
    """
    for dataset in spec.datasets():
        if dataset.staging is None:
            yield from map(of_path, dataset.paths)
    if result.output_path is not None and (model := _VERSION.fullmatch(result.model_uri)) is not None:
        yield Named(MODELS, *model.groups())


def written_by(spec: AnyJobSpec, result: JobResult) -> Iterator[Named]:
    """Yield what a job has written: the registered version of its model and the model's file, or the predictions.

    :param spec: Spec of the job, as it was submitted.
    :param result: Result of the job.
    """
    if result.output_path is not None:
        yield of_path(result.output_path)
        return
    if spec.register_as is not None and result.model_version:
        yield Named(MODELS, spec.register_as.model, result.model_version)
    if result.model_path:
        yield of_path(result.model_path)


def lineage_of(spec: AnyJobSpec, result: JobResult) -> OperatorLineage:
    """Return what a job has read and written, for Airflow's OpenLineage provider, which has to be installed.

    :param spec: Spec of the job, as it was submitted.
    :param result: Result of the job.
    """
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset
    from openlineage.client.facet_v2 import dataset_version_dataset, sql_job

    def datasets(named: Iterable[Named]) -> list[Dataset]:
        facet = dataset_version_dataset.DatasetVersionDatasetFacet
        return [
            Dataset(
                namespace=one.namespace,
                name=one.name,
                facets={"version": facet(datasetVersion=one.version)} if one.version else {},
            )
            for one in dict.fromkeys(named)
        ]

    queries = dict.fromkeys(dataset.sql for dataset in spec.datasets() if dataset.sql is not None)
    return OperatorLineage(
        inputs=datasets(read_by(spec, result)),
        outputs=datasets(written_by(spec, result)),
        job_facets={"sql": sql_job.SQLJobFacet(query="\n;\n".join(queries))} if queries else {},
    )
