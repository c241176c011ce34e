"""List the data and models that a job has read and written, by their OpenLineage names
(https://openlineage.io/docs/spec/naming)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from shoal.jobs import AnyJobSpec, JobResult

MODELS = "shoal://models"
"""OpenLineage namespace of registered models. The namespace, a slash and the model's name are the URI of the model's
asset in Airflow."""

_SCHEMES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
"""Alternative URI schemes, each with the scheme that OpenLineage uses for the same storage."""

_KEEPS_SLASH = ("hdfs", "webhdfs")
"""URI schemes of file systems, where a path begins with a slash. In all other schemes, the path is the key of an
object, without a slash at its beginning."""

_WILDCARD = re.compile(r"[*?\[]")

_VERSION = re.compile(r"models:/([^/@]+)/(\w+)")


class Named(NamedTuple):
    """OpenLineage name of a dataset or of a registered model. Only a registered model has a version."""

    namespace: str
    name: str
    version: str | None = None


def of_path(path: str) -> Named:
    """Return the OpenLineage name of a file or folder.

    For a path with a wildcard, the name is that of the folder that contains the matching files.

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
    """Yield the OpenLineage names of the files that a job has read and, for a prediction job, of the model. Rows of a
    database and staged copies of rows are left out, because they have no OpenLineage name.

    :param spec: Spec of the job, as it was submitted.
    :param result: Result of the job.
    """
    for dataset in spec.datasets():
        if dataset.staging is None:
            yield from map(of_path, dataset.paths)
    if result.output_path is not None and (model := _VERSION.fullmatch(result.model_uri)) is not None:
        yield Named(MODELS, *model.groups())


def written_by(spec: AnyJobSpec, result: JobResult) -> Iterator[Named]:
    """Yield the OpenLineage names of a job's outputs: for a prediction job the predictions, otherwise the registered
    model version and the model's file.

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
    """Return a job's inputs and outputs as an object of Airflow's OpenLineage provider, which has to be installed.

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
