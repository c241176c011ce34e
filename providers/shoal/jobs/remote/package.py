"""Send the code and the small DataFrames of a job to a cluster that shares no folder with the submitter, as a package
of Ray's Job API.

The package is a zip archive with the files of the job's code (`shoal.jobs.files.code_store`) and of its small
DataFrames, called frames (`shoal.jobs.remote.frames`). The submitter uploads the package to the head over HTTP, so that
the submitter needs no Ray. Ray unpacks the package into the folder in which the driver starts, and also on the nodes of
the workers if the package has frames. Ray removes the package after the job. The path of each file contains the SHA-256
of its content, which every reader of the file checks.

Each attempt has a package of its own. Ray removes a package when the last job that names it has ended, but does not
know the jobs that still wait in shoal's queue.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping
from typing import Any

from shoal.data.parquet.files import PACKAGED_SCHEME, PACKAGED_URI
from shoal.jobs import ids
from shoal.jobs.environment import code
from shoal.jobs.files import storage
from shoal.jobs.specs.function import AnyJobSpec

_PREFIX = f"{PACKAGED_SCHEME}:"
"""Prefix of those paths in a spec that are relative to the unpacked package."""

_CODE = re.compile(r"(?:/|file://).*(/_code/[0-9a-f]{64})", re.DOTALL)
_PLACES = ("program", "user_code", "init_model")


def archived(files: Mapping[str, str]) -> bytes:
    """Return a package as a zip archive, from the path on this machine of each file, by its path in the package.

    Raises:
        JobError: A file cannot be read, or was changed.
    """
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        for inside, path in sorted(files.items()):
            # The path in the package is `/_code/<digest>` or `/_data/<digest>/<name>`.
            content = storage.read_unchanged(path, inside.split("/")[2])
            code.add_to_zip(written, inside.removeprefix("/"), content, mode=0o600)
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
    return any(path.startswith(PACKAGED_URI) for dataset in spec.datasets() for path in dataset.paths)


def name(submission_id: str) -> str:
    """Return the name of an attempt's package. The name contains only characters that Ray allows."""
    return f"_ray_pkg_shoal_{ids.digest(submission_id)[:32]}.zip"


def _with_code(document: dict[str, Any], replaced: Any) -> dict[str, Any]:
    copy = {**document, **{place: replaced(document[place]) for place in _PLACES if place in document}}
    config = document.get("run_config") or {}
    if config.get("code"):
        copy["run_config"] = {**config, "code": [replaced(path) for path in config["code"]]}
    return copy
