"""Send the files of a job to a cluster that shares no folder with the submitter, and refuse files out of reach.

The files travel as a package of Ray's Job API: a zip archive with the job's code (`shoal.jobs.shipped_code`) and its
small DataFrames, called frames. The submitter uploads the package to the head over HTTP, so that it needs no Ray.
Ray unpacks the package into the folder in which the driver starts, and also on the nodes of the workers if the package
has frames. Ray removes the package after the job. The path of each file contains the SHA-256 of its content, which
every reader of the file checks.

Each attempt has a package of its own. Ray removes a package when the last job that names it has ended, but does not
know the jobs that still wait in shoal's queue.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import select

from shoal.data.dataset_spec import DatasetSpec
from shoal.data.parquet import files as parquet_files
from shoal.data.staged_data import release, staged
from shoal.errors import DataError, InvalidArgumentError, PoolNotFoundError
from shoal.jobs import ids, shipped_code
from shoal.jobs.files import storage
from shoal.jobs.spec import CODE_FIELDS, OBJECT_STORE, AnyJobSpec
from shoal.pool.api import ComputePool
from shoal.pool.backends import backend_of
from shoal.pool.journal import rows
from shoal.pool.spec import PoolSpec
from shoal.secrets.redaction import redact_value
from shoal.state import Store
from shoal.state.home import home
from shoal.state.schema import Pool
from shoal.training.locations import SQLITE, local_path

_PREFIX = f"{parquet_files.PACKAGED_SCHEME}:"
"""Prefix of those paths in a spec that are relative to the unpacked package."""

_CODE = re.compile(r"(?:/|file://).*(/_code/[0-9a-f]{64})", re.DOTALL)
_PLACES = (*CODE_FIELDS, "init_model")


def archived(files: Mapping[str, str]) -> bytes:
    """Return a package as a zip archive, from the path on this machine of each file, by its path in the package."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        for inside, path in sorted(files.items()):
            # The path in the package is `/_code/<digest>` or `/_data/<digest>/<name>`.
            content = storage.read_unchanged(path, inside.split("/")[2])
            shipped_code.add_to_zip(written, inside.removeprefix("/"), content, mode=0o600)
    return archive.getvalue()


def taken_along(document: dict[str, Any], frames: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the spec, and the path on this machine of each file with its code and frames, by its path in the package.

    The returned spec is a copy that names the files by their paths in the package. Code at a URI, such as in an object
    store, is not packed.
    """
    files = dict(frames)

    def inside(path: Any) -> Any:
        if not isinstance(path, str) or (found := _CODE.fullmatch(path)) is None:
            return path
        files[found[1]] = storage.root(path)
        return _PREFIX + found[1]

    return _with_code(document, inside), files


def unpacked(document: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return a copy of a spec in which the paths of the unpacked files replace the paths in the package."""

    def outside(path: Any) -> Any:
        return folder + path.removeprefix(_PREFIX) if isinstance(path, str) and path.startswith(_PREFIX) else path

    return _with_code(document, outside)


def for_workers(runtime_env: dict[str, Any], submission_id: str) -> dict[str, Any]:
    """Add an attempt's package to the runtime environment of its workers.

    Then the workers can read the frames (small DataFrames) in the package.
    """
    return {**runtime_env, "py_modules": [*runtime_env.get("py_modules", ()), f"gcs://{name(submission_id)}"]}


def is_used(document: dict[str, Any]) -> bool:
    """Return whether a spec refers to files in a package."""
    # The spec is not parsed, because a newer version of shoal may have submitted the job with options that this version
    # does not know. In the text of the spec, the paths of all files in the job's package begin with `_PREFIX`.
    return f'"{_PREFIX}' in json.dumps(document)


def has_frames(spec: AnyJobSpec) -> bool:
    """Return whether a spec refers to frames (small DataFrames) that are in the job's package."""
    return any(path.startswith(parquet_files.PACKAGED_URI) for dataset in spec.datasets() for path in dataset.paths)


def name(submission_id: str) -> str:
    """Return the name of an attempt's package. The name contains only characters that Ray allows."""
    return f"_ray_pkg_shoal_{ids.digest(submission_id)[:32]}.zip"


def _with_code(document: dict[str, Any], replaced: Any) -> dict[str, Any]:
    copy = {**document, **{place: replaced(document[place]) for place in _PLACES if place in document}}
    config = document.get("run_config") or {}
    if config.get("code"):
        copy["run_config"] = {**config, "code": [replaced(path) for path in config["code"]]}
    return copy


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
    # `check` refuses the job later.
    if base is None or base == storage.IN_STORE or not is_reachable(base, pool):
        yield spec, {}
        return
    copies: dict[str, str] = {}
    try:
        for original in sorted(local):
            with staged(parquet_files.join(parquet_files.normalise(base), "staging")) as copy:
                copies[original] = copy
                filesystem, inner = parquet_files.resolve(parquet_files.normalise(copy))
                for file in _files(original):
                    with file.open("rb") as source, filesystem.open_output_stream(f"{inner}/{file.name}") as target:
                        shutil.copyfileobj(source, target, _CHUNK_BYTES)
        yield spec.with_datasets(partial(_moved, copies)), {}
    finally:
        for copy in copies.values():
            release(copy)


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
    paths = []
    for file in parquet_files.list_files(dataset.paths):
        digest = hashlib.sha256(Path(file.path).read_bytes()).hexdigest()
        inside = parquet_files.packaged_path(digest, Path(file.path).name)
        packed[inside] = file.path
        paths.append(parquet_files.PACKAGED_URI + inside)
    return dataset.model_copy(update={"paths": tuple(paths), "staging": None})


def _moved(copies: Mapping[str, str], dataset: DatasetSpec) -> DatasetSpec:
    copy = copies.get(dataset.staging or "")
    if copy is None or dataset.staging is None:
        return dataset
    paths = tuple(copy + path.removeprefix(dataset.staging) for path in dataset.paths)
    return dataset.model_copy(update={"paths": paths, "staging": copy})


def is_remote(spec: PoolSpec) -> bool:
    """Return whether the pool's nodes may be on hosts that share only the network with this process."""
    return not backend_of(spec).shares_files


def is_reachable(location: str, pool: PoolSpec) -> bool:
    """Return whether a location is a URI, or in a folder that the pool's nodes share with this machine."""
    path = path_here(location)
    return path is None or pool.shares(path)


def path_here(location: str) -> str | None:
    """Return the path of a location on this machine; None if the location is a URI."""
    path = local_path(location)
    return None if "://" in path else os.path.normpath(Path(path).expanduser().absolute())


_SHARED = (
    "if all hosts mount it at the same path, name its folder in the option shared_folders of the pool (several folders "
    "are separated by commas)"
)

_MLFLOW_SERVER = "set MLFLOW_TRACKING_URI to an MLflow server"

_TOO_LARGE = (
    f"only data of at most {MAX_FRAME_BYTES // 2**20} MiB are sent with a job, so set "
    f"run_config.artifact_location, or pass staging_location=, with a URI in {OBJECT_STORE}"
)


def spec_of(store: Store, pool: str) -> PoolSpec:
    """Return the settings of a pool."""
    with store.reading() as session:
        if (spec := session.scalar(select(Pool.spec).where(Pool.name == pool))) is None:
            raise PoolNotFoundError(pool, rows.pool_names(session))
    return PoolSpec.model_validate(spec)


def located(spec: AnyJobSpec, pool: PoolSpec) -> AnyJobSpec:
    """Make sure that the job's results go to a location that the pool's nodes can reach, and return the spec.

    If the spec names no location and the nodes do not share `$SHOAL_HOME`, the results go into the state store. If the
    nodes share `$SHOAL_HOME`, the MLflow database in it is named, because the nodes' own home is another one. In all
    other cases the spec is returned unchanged.
    """
    if not is_remote(pool):
        return spec
    if is_reachable(str(home()), pool):
        if spec.tracking is None or spec.tracking.uri is not None:
            return spec
        return spec.model_copy(update={"tracking": spec.tracking.model_copy(update={"uri": storage.default_uri()})})
    if spec.run_config.artifact_location is not None:
        return spec
    config = spec.run_config.model_copy(update={"artifact_location": storage.IN_STORE})
    return spec.model_copy(update={"run_config": config})


def check(spec: AnyJobSpec, pool: PoolSpec) -> None:
    """Refuse a job that names a file on this machine, if the pool's nodes may be on other hosts.

    A file in one of the pool's `shared_folders` is allowed.
    """
    if not is_remote(pool):
        return
    for location, what, remedy in _needed(spec):
        path = None if location is None else path_here(location)
        if path is not None and not is_reachable(path, pool):
            raise InvalidArgumentError(
                f'{what} {redact_value(path)} is on this machine, where the nodes of pool "{pool.name}" cannot reach '
                f"it: {remedy}; or, {_SHARED}"
            )
    if spec.register_as is not None and spec.tracking is not None and spec.tracking.uri is None:
        raise InvalidArgumentError(
            f'the nodes of pool "{pool.name}" would register the model in a database of their own, which nobody else '
            f"reads: {_MLFLOW_SERVER}"
        )
    if spec.run_config.artifact_location == storage.IN_STORE and spec.exchanges_files:
        raise InvalidArgumentError(
            "the rows and results of partitions must be written to a location that all nodes can reach: set "
            f"run_config.artifact_location to a URI in {OBJECT_STORE}"
        )
    if spec.run_config.artifact_location == storage.IN_STORE and any(each.is_copied for each in spec.datasets()):
        raise InvalidArgumentError(
            "the job copies the rows of a dataset (options sql, stage, or format csv or json) to a location that all "
            "nodes must be able to read: set "
            f"run_config.artifact_location to a URI in {OBJECT_STORE}"
        )


def check_nodes(store: Store, pool: PoolSpec) -> None:
    """Check whether jobs can run on the nodes, once for each pool and environment (`ComputePool.check_nodes`)."""
    if is_remote(pool) and (broken := ComputePool(pool.name, store=store, is_named=False).check_nodes()):
        problems = "; ".join(str(each) for each in broken)
        raise InvalidArgumentError(
            f'no job can run on the nodes of pool "{pool.name}": {problems}. Correct this, then run '
            f"`shoal doctor --pool {pool.name}` to check the nodes again"
        )


def _needed(spec: AnyJobSpec) -> Iterator[tuple[str | None, str, str]]:
    """Yield each location that a job needs, with a description and a remedy if it cannot be reached."""
    for dataset in spec.datasets():
        yield dataset.staging, "the staged copy of a frame or a query in", _TOO_LARGE
        for path in dataset.paths:
            yield path, "the dataset", f"copy it to {OBJECT_STORE}"
    yield spec.run_config.artifact_location, "artifact_location", f"set it to a URI in {OBJECT_STORE}"
    tracking = spec.tracking
    if tracking is not None and tracking.uri and tracking.uri != "databricks":
        yield (
            tracking.uri.removeprefix(SQLITE).removeprefix("sqlite:"),
            f"MLflow's database {redact_value(tracking.uri)}, the file",
            f"{_MLFLOW_SERVER}, or set RunConfig(tracking=None) to record nothing",
        )
    yield from spec.locations()
