"""Create directories for the Parquet files that shoal writes for the workers (staged data), record which processes and
jobs use the files, and remove them.

A directory of staged data contains a marker file, which names the process that uses the data, and a file for each job
that uses the data. The directory is removed when neither a process nor a job uses the data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from shoal.data.connections import refuse_storage
from shoal.data.parquet.files import is_local, join, need, normalise, resolve
from shoal.errors import DataAccessError, DataError, InvalidArgumentError
from shoal.lazy_imports import fs, pa
from shoal.new_files import create_folder
from shoal.os_processes import ProcessId

# Name of the marker file in each directory that shoal creates for staged data. shoal removes only directories that
# contain this file. The name begins with an underscore, so that readers of the data skip the file. The file contains
# the process that uses the data, as JSON: {"process": {...}}, or {"process": null} after this process has released the
# data.
MARKER = "_shoal_staging"

# Prefix of the names of empty files in a directory of staged data. Each file represents an attempt of a job that uses
# the data, and the rest of its name is the id of the attempt. The file is removed when the attempt ends.
_USED_BY = "_shoal_used_by."


def claim(location: str, user: str) -> None:
    """Record in a directory of staged data that a job uses the data."""
    filesystem, inner = resolve(normalise(location))
    # Object stores have no real directories. Without this check, writing the file would create the removed directory
    # again, and it would never be removed.
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == fs.FileType.NotFound:
        raise DataError(
            f"the staged data in {location} do not exist any more: stage them again by creating the connector again"
        )
    with filesystem.open_output_stream(f"{inner}/{_USED_BY}{user}"):
        pass


def claims(location: str) -> set[str]:
    """Return the ids of the attempts that use a directory of staged data."""
    filesystem, inner = resolve(normalise(location))
    found = filesystem.get_file_info(fs.FileSelector(inner, allow_not_found=True))
    return {file.base_name.removeprefix(_USED_BY) for file in found if file.base_name.startswith(_USED_BY)}


def unclaim(location: str, user: str) -> None:
    """Record in a directory of staged data that a job no longer uses the data."""
    filesystem, inner = resolve(normalise(location))
    with contextlib.suppress(FileNotFoundError):
        filesystem.delete_file(f"{inner}/{_USED_BY}{user}")


def release(location: str) -> bool:
    """Record in a directory of staged data that this process no longer uses the data, and remove the directory if no
    job uses it.
    """
    filesystem, inner = resolve(normalise(location))
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == fs.FileType.NotFound:
        return False
    # This process first records in the marker file that it no longer uses the data, and then looks for jobs that use
    # the data. A job that ends at the same time first removes its own file, and then reads the marker file. Therefore
    # at least one of the two finds that the data is unused, and removes the directory.
    _write_holder(filesystem, inner, None)
    return discard_unused(location)


def hand_over(location: str) -> None:
    """Keep a directory of staged data after the end of this process, because another process will submit a job with
    this data.

    The marker file then names no process, so the directory stays until a job has used the data and ended.
    """
    filesystem, inner = resolve(normalise(location))
    with filesystem.open_output_stream(f"{inner}/{MARKER}"):
        pass


def discard_unused(location: str) -> bool:
    """Remove a directory of staged data if neither a process nor a job uses the data."""
    return not is_held(location) and not claims(location) and discard(location)


def is_held(location: str, *, unknown: bool = False) -> bool:
    """Return whether the process that uses a directory of staged data is running, or may be running on another host."""
    filesystem, inner = resolve(normalise(location))
    try:
        with filesystem.open_input_stream(f"{inner}/{MARKER}") as stream:
            process = json.loads(stream.read())["process"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return unknown
    return process is not None and not ProcessId.from_json(process).known_dead()


def _write_holder(filesystem: fs.FileSystem, inner: str, process: ProcessId | None) -> None:
    with filesystem.open_output_stream(f"{inner}/{MARKER}") as stream:
        stream.write(json.dumps({"process": process.to_json() if process else None}).encode())


def discard(location: str) -> bool:
    """Remove a directory that shoal created for staged data, even if a process or a job still uses the data."""
    filesystem, inner = resolve(normalise(location))
    directory, marker = filesystem.get_file_info([inner, f"{inner}/{MARKER}"])
    if directory.type == fs.FileType.NotFound:
        return False
    if marker.type == fs.FileType.NotFound:
        raise InvalidArgumentError(
            f"{location} was not staged by shoal and is not removed, because it contains no file {MARKER}"
        )
    # The marker file is removed last. If this process is killed before the end, the next call of this function still
    # finds the marker file, and removes the rest.
    for found in filesystem.get_file_info(fs.FileSelector(inner)):
        if found.type == fs.FileType.Directory:
            filesystem.delete_dir(found.path)
        elif found.base_name != MARKER:
            filesystem.delete_file(found.path)
    filesystem.delete_dir(inner)
    return True


_GLOB = "*?[]"
"""Characters that fsspec interprets as a pattern when it removes a directory. URIs that contain these characters are
refused."""


def default_location() -> str:
    """Return the default staging location: ``$SHOAL_HOME/staging``, or ``~/.shoal/staging`` without ``SHOAL_HOME``."""
    home = os.environ.get("SHOAL_HOME") or "~/.shoal"
    return str(Path(home).expanduser().absolute() / "staging")


@contextlib.contextmanager
def staged(staging_location: str | os.PathLike[str] | None = None, name: str | None = None) -> Iterator[str]:
    """Create a directory for one staged dataset, and remove the directory if the ``with`` block raises an exception."""
    need("pyarrow", "numpy")
    base = default_location() if staging_location is None else normalise(staging_location)
    refuse_storage(base, "staging_location")
    if not is_local(base) and any(character in base for character in _GLOB):
        raise InvalidArgumentError(
            f"staging_location {base} contains one of the characters {_GLOB}: use a URI without these characters"
        )
    directory = join(base, name or uuid.uuid4().hex)
    try:
        if is_local(directory):
            # With mode 700, other users of this host cannot read the staged rows.
            create_folder(Path(base))
            Path(directory).mkdir(mode=0o700)
        filesystem, inner = resolve(directory)
        filesystem.create_dir(inner, recursive=True)
        _write_holder(filesystem, inner, ProcessId.mine())
    except DataError:
        raise
    except (OSError, ValueError, pa.ArrowException) as exc:
        # ValueError is also caught, because Python raises it for a path that contains a NUL character.
        raise DataAccessError(
            f"data cannot be staged in {base}: {exc}; pass staging_location= with a writable directory or URI"
        ) from None
    try:
        yield directory
    except BaseException:
        with contextlib.suppress(OSError, DataError):
            discard(directory)
        raise


log = logging.getLogger(__name__)

_kept: list[StagedCopy] = []

_WRITTEN, _SUBMITTED = "written as JSON", "submitted"


class StagedCopy:
    """Reference of this process to a staged copy of data: Parquet files that shoal wrote for the workers.

    The sources of connectors and the specs of datasets refer to this object. The copy is removed when the last of these
    sources and specs is deleted, or when the process exits. If a job still uses the copy, the copy is removed when the
    job ends. If a spec was written as JSON but not submitted, another process may submit the spec later. The copy is
    then kept until a job has used it.

    Args:
        location: Directory or URI of the copy.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._uses: set[str] = set()
        self._release = weakref.finalize(self, _release, location, os.getpid(), self._uses)

    def __eq__(self, other: object) -> bool:
        # pydantic compares two specs with this method, too. Specs with equal fields must be equal, even if only one of
        # them refers to a staged copy.
        return other is None or isinstance(other, StagedCopy)

    def __hash__(self) -> int:
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A pickled connector or spec contains None instead of this object, so that another process does not remove the
        # data.
        return type(None), ()

    def discard(self) -> bool:
        """Remove the staged copy of the data now; return False if the copy no longer existed."""
        self._release.detach()
        return discard(self.location)

    def written(self) -> None:
        """Record that a spec with this staged copy was written as JSON. The copy is then kept for the process that
        submits the spec."""
        self._uses.add(_WRITTEN)

    def submitted(self) -> None:
        """Record that this process has submitted a job with this staged copy. The copy is then removed when the job no
        longer uses it."""
        self._uses.add(_SUBMITTED)

    def keep(self) -> None:
        """Keep the staged copy of the data until this process exits."""
        _kept.append(self)


def _release(location: str, pid: int, uses: set[str]) -> None:
    # A forked child process also runs this finalizer, but only the process that created the StagedCopy may release the
    # data.
    if os.getpid() != pid:
        return
    try:
        if uses == {_WRITTEN}:
            hand_over(location)
        else:
            release(location)
    except Exception as error:
        log.warning("the staged data in %s could not be removed: %s", location, error)
