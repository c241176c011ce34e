"""Give the nodes of a `ray://` pool (an existing Ray cluster) access to staged data on this machine.

Small data are sent together with the job's code (`shoal.jobs.remote.package`). Larger data are copied to
`artifact_location`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shoal.data.dataset_spec import DatasetSpec
from shoal.data.parquet.files import packaged_path, packaged_uri
from shoal.errors import DataError
from shoal.jobs.files import storage
from shoal.jobs.specs.function import AnyJobSpec
from shoal.pool.backends import BACKENDS
from shoal.pool.spec import PoolSpec
from shoal.training.locations import local_path

MAX_FRAME_BYTES = 8 * 2**20
"""Limit of all frames of a job, as Parquet. The head keeps them in memory until the job has ended."""

_OURS = "_shoal_"
"""Prefix of the names of files without rows, such as markers, in a directory of staged data."""

_CHUNK_BYTES = 1024 * 1024


@contextmanager
def sent_for(spec: AnyJobSpec, pool: PoolSpec) -> Iterator[tuple[AnyJobSpec, dict[str, str]]]:
    """Give the pool's nodes access to the staged data that a spec names. Provide a spec whose data the nodes can read,
    and the path on this machine of each file to send with the job's code, by its path in the package.

    Data that the nodes can reach are not copied. All other data are sent with the code if they are small; otherwise
    they are copied to the spec's `artifact_location`. At the end of the block, the copies that no job uses are removed.
    All other copies are removed when the jobs that use them have ended.

    Raises:
        DataError: The data cannot be read, or a copy cannot be written.
    """
    local = {each.staging for each in spec.datasets() if each.staging and not is_reachable(each.staging, pool)}
    if not is_remote(pool) or not local:
        yield spec, {}
        return
    if sum(file.stat().st_size for directory in local for file in _files(directory)) <= MAX_FRAME_BYTES:
        packed: dict[str, str] = {}
        yield spec.with_datasets(partial(_packed, local, packed)), packed
        return
    base = spec.run_config.artifact_location
    # The spec names no location that the nodes can reach, so there is no place to copy the data to.
    # `reachability.check` refuses the job later.
    if base is None or base == storage.IN_STORE or not is_reachable(base, pool):
        yield spec, {}
        return
    from shoal.data.parquet.files import join, normalise
    from shoal.data.staged_data import release, staged

    copies: dict[str, str] = {}
    try:
        for original in sorted(local):
            with staged(join(normalise(base), "staging")) as copy:
                copies[original] = copy
                _copy(original, copy)
        yield spec.with_datasets(partial(_moved, copies)), {}
    finally:
        for copy in copies.values():
            release(copy)


def _copy(original: str, copy: str) -> None:
    from shoal.data.parquet.files import normalise, resolve

    filesystem, inner = resolve(normalise(copy))
    for file in _files(original):
        with file.open("rb") as source, filesystem.open_output_stream(f"{inner}/{file.name}") as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)


def _files(directory: str) -> list[Path]:
    """List the data files in a directory of staged data; files of shoal itself, such as markers, are left out."""
    try:
        return [file for file in sorted(Path(directory).iterdir()) if not file.name.startswith(_OURS)]
    except FileNotFoundError:
        raise DataError(
            f"the staged data in {directory} do not exist any more: stage them again by creating the connector again"
        ) from None


def _packed(local: Collection[str], packed: dict[str, str], dataset: DatasetSpec) -> DatasetSpec:
    """Add the files of a dataset to the package, and return a copy of the dataset that names the packaged files."""
    if dataset.staging not in local:
        return dataset
    from shoal.data.parquet.files import list_files

    paths = []
    for file in list_files(dataset.paths):
        digest = hashlib.sha256(Path(file.path).read_bytes()).hexdigest()
        inside = packaged_path(digest, Path(file.path).name)
        packed[inside] = file.path
        paths.append(packaged_uri(inside))
    return dataset.model_copy(update={"paths": tuple(paths), "staging": None})


def _moved(copies: Mapping[str, str], dataset: DatasetSpec) -> DatasetSpec:
    copy = copies.get(dataset.staging or "")
    if copy is None or dataset.staging is None:
        return dataset
    paths = tuple(copy + path.removeprefix(dataset.staging) for path in dataset.paths)
    return dataset.model_copy(update={"paths": paths, "staging": copy})


def is_remote(spec: PoolSpec) -> bool:
    """Return whether the pool's nodes may be on hosts that share only the network with this process."""
    return not BACKENDS[spec.backend]().bound_to_host


def is_reachable(location: str, pool: PoolSpec) -> bool:
    """Return whether a location is a URI, or in a folder that the pool's nodes share with this machine."""
    path = path_here(location)
    return path is None or pool.shares(path)


def path_here(location: str) -> str | None:
    """Return the path of a location on this machine; None if the location is a URI."""
    path = local_path(location)
    return None if "://" in path else os.path.normpath(Path(path).expanduser().absolute())
