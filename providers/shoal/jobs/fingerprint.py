"""Compute the fingerprint of a job. A task that runs again uses the fingerprint to find its earlier job."""

from __future__ import annotations

from shoal.data.spec import DatasetSpec
from shoal.jobs import credentials, ids
from shoal.jobs.specs.base import AnySpec


def fingerprint(spec: AnySpec) -> str:
    """Compute the digest of a spec. If a job is submitted again, the equal digest shows that it is the same job.

    The digest depends on the content of staged data, but not on their folder. A task that runs again writes its
    DataFrame into another folder, and must still find its job.

    Raises:
        DataError: Staged data do not exist any more, because a job that used them has ended and removed them.
    """
    document = spec.comparable(_by_content).document()
    # `priority` is left out, because two submissions that differ only in `priority` count as the same job.
    document["run_config"].pop("priority", None)
    # Only the names of code archives are kept, because their folders may differ between hosts. An archive's name is the
    # digest of the archive's content.
    if archives := document["run_config"].get("code"):
        document["run_config"]["code"] = [path.rsplit("/", 1)[-1] for path in archives]
    # These options are left out, because they do not change what the job computes. Tasks of earlier versions of shoal
    # did not set `skip_if_unchanged`. If shoal was updated since then, a retry of such a task must still find its job.
    for name in ("parent_run_id", "system_metrics"):
        (document.get("tracking") or {}).pop(name, None)
    (document.get("register") or {}).pop("skip_if_unchanged", None)
    return ids.digest(credentials.hide(document)[0])


def _by_content(dataset: DatasetSpec) -> DatasetSpec:
    if dataset.staging is None:
        return dataset
    from shoal.data.connector import DataConnector

    digest = DataConnector.from_spec(dataset).digest()
    return dataset.model_copy(update={"paths": (digest,), "staging": None})
