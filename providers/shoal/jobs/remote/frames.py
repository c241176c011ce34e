"""Copy staged data of this machine to `artifact_location`, where the nodes of a pool that others run can read them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shoal.data.spec import DatasetSpec
from shoal.jobs.remote import reach
from shoal.jobs.specs.function import AnyJobSpec
from shoal.pool.spec import PoolSpec

_OURS = "_shoal_"
"""First part of the names of the files in a directory of staged data that contain no rows."""

_CHUNK_BYTES = 1024 * 1024


@contextmanager
def copies_for(spec: AnyJobSpec, pool: PoolSpec) -> Iterator[AnyJobSpec]:
    """Copy the staged data that a spec names to its `artifact_location`, and yield a spec that names the copies.

    Data that the nodes can reach stay where they are. At the end of the block, the copies that no job uses are removed.
    The others are removed when the jobs that use them have ended.

    Args:
        spec: Spec of the job.
        pool: Settings of the pool.

    Raises:
        DataError: A copy cannot be written.
    """
    base = spec.run_config.artifact_location
    local = {each.staging for each in spec.datasets() if each.staging and not reach.is_reachable(each.staging, pool)}
    # Without a location that the nodes can reach, `reach.check` refuses the job.
    if not reach.is_remote(pool) or not local or base is None or not reach.is_reachable(base, pool):
        yield spec
        return
    from shoal.data.parquet.filesystems import join, normalise
    from shoal.data.staging.staged_data import release, staged

    copies: dict[str, str] = {}
    try:
        for original in sorted(local):
            with staged(join(normalise(base), "staging")) as copy:
                copies[original] = copy
                _copy(original, copy)
        yield spec.with_datasets(partial(_moved, copies))
    finally:
        for copy in copies.values():
            release(copy)


def _copy(original: str, copy: str) -> None:
    from shoal.data.parquet.filesystems import normalise, resolve

    filesystem, inner = resolve(normalise(copy))
    for file in sorted(Path(original).iterdir()):
        if not file.name.startswith(_OURS):
            with file.open("rb") as source, filesystem.open_output_stream(f"{inner}/{file.name}") as target:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _moved(copies: Mapping[str, str], dataset: DatasetSpec) -> DatasetSpec:
    copy = copies.get(dataset.staging or "")
    if copy is None or dataset.staging is None:
        return dataset
    paths = tuple(copy + path.removeprefix(dataset.staging) for path in dataset.paths)
    return dataset.model_copy(update={"paths": paths, "staging": copy})
