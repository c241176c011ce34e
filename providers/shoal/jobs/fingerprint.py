"""Compute the fingerprint of a job. A task that runs again uses the fingerprint to find its earlier job."""

from __future__ import annotations

from shoal.data.spec import DatasetSpec
from shoal.jobs import credentials, ids
from shoal.jobs.specs.base import AnySpec


def fingerprint(spec: AnySpec) -> str:
    """Compute the digest of a spec. If a job is submitted again, the equal digest shows that it is the same job.

    The digest depends on the content of staged data, but not on their folder. A task that runs again writes its
    DataFrame into another folder, and must still find its job.

    Args:
        spec: Spec as `AnySpec.identifying` returns it.

    Raises:
        DataError: Staged data do not exist any more, because a job that used them has ended and removed them.
    """
    document = spec.comparable(_by_content).document()
    # Two submissions that differ only in `priority` or `skip_if_unchanged` count as the same job. Tasks of
    # earlier versions of shoal did not set `skip_if_unchanged`. A retry of such a task therefore still finds its job.
    document["run_config"].pop("priority", None)
    # The name of a code archive is the digest of its content. The folder of the archive may differ between hosts.
    if archives := document["run_config"].get("code"):
        document["run_config"]["code"] = [path.rsplit("/", 1)[-1] for path in archives]
    # The options `parent_run_id`, `system_metrics` and `skip_if_unchanged` do not change what the job computes.
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
