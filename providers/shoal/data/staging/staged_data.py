"""Record which processes and jobs use staged data (Parquet files that shoal writes for the workers), and remove staged
data.

A directory of staged data contains a marker file, which names the process that uses the data, and a file for each job
that uses the data. The directory is removed when neither a process nor a job uses the data.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from shoal.data.parquet.filesystems import resolve
from shoal.data.parquet.paths import normalise
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from shoal.state.process import ProcessId

# Name of the marker file in each directory that shoal creates for staged data. shoal removes only directories that
# contain this file. The name begins with an underscore, so that readers of the data skip the file. The file contains
# the process that uses the data, as JSON: {"process": {...}}, or {"process": null} after this process has released the
# data.
MARKER = "_shoal_staging"

# Prefix of the names of empty files in a directory of staged data. Each file represents an attempt of a job that uses
# the data, and the rest of its name is the id of the attempt. The file is removed when the attempt ends.
_USED_BY = "_shoal_used_by."


def hold(location: str) -> None:
    """Record in a directory of staged data that this process uses the data."""
    filesystem, inner = resolve(normalise(location))
    _write_holder(filesystem, inner, _this_process())


def claim(location: str, user: str) -> None:
    """Record in a directory of staged data that a job uses the data.

    Raises:
        DataError: If the directory was removed.
    """
    from pyarrow.fs import FileType

    filesystem, inner = resolve(normalise(location))
    # Object stores have no real directories. Without this check, writing the file would create the removed directory
    # again, and it would never be removed.
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == FileType.NotFound:
        raise DataError(
            f"the staged data in {location} do not exist any more: stage them again by creating the connector again"
        )
    with filesystem.open_output_stream(f"{inner}/{_USED_BY}{user}"):
        pass


def claims(location: str) -> set[str]:
    """Return the ids of the attempts that use a directory of staged data."""
    from pyarrow.fs import FileSelector

    filesystem, inner = resolve(normalise(location))
    found = filesystem.get_file_info(FileSelector(inner, allow_not_found=True))
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
    from pyarrow.fs import FileType

    filesystem, inner = resolve(normalise(location))
    if filesystem.get_file_info([f"{inner}/{MARKER}"])[0].type == FileType.NotFound:
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
    """Remove a directory of staged data if neither a process nor a job uses the data.

    Raises:
        InvalidArgumentError: If the directory exists, but has no marker file.
    """
    return not is_held(location) and not claims(location) and discard(location)


def is_held(location: str, *, unknown: bool = False) -> bool:
    """Return whether the process that uses a directory of staged data is running, or may be running on another host."""
    filesystem, inner = resolve(normalise(location))
    try:
        with filesystem.open_input_stream(f"{inner}/{MARKER}") as stream:
            process = json.loads(stream.read())["process"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return unknown
    from shoal.state.process import ProcessId

    return process is not None and not ProcessId.from_json(process).known_dead()


def _write_holder(filesystem: FileSystem, inner: str, process: ProcessId | None) -> None:
    with filesystem.open_output_stream(f"{inner}/{MARKER}") as stream:
        stream.write(json.dumps({"process": process.to_json() if process else None}).encode())


def _this_process() -> ProcessId:
    from shoal.state.process import ProcessId

    return ProcessId.mine()


def discard(location: str) -> bool:
    """Remove a directory that shoal created for staged data, even if a process or a job still uses the data.

    Raises:
        InvalidArgumentError: If shoal did not create the directory. Nothing is removed in this case.
    """
    from pyarrow.fs import FileSelector, FileType

    filesystem, inner = resolve(normalise(location))
    directory, marker = filesystem.get_file_info([inner, f"{inner}/{MARKER}"])
    if directory.type == FileType.NotFound:
        return False
    if marker.type == FileType.NotFound:
        raise InvalidArgumentError(
            f"{location} was not staged by shoal and is not removed, because it contains no file {MARKER}"
        )
    # The marker file is removed last. If this process is killed before the end, the next call of this function still
    # finds the marker file, and removes the rest.
    for found in filesystem.get_file_info(FileSelector(inner)):
        if found.type == FileType.Directory:
            filesystem.delete_dir(found.path)
        elif found.base_name != MARKER:
            filesystem.delete_file(found.path)
    filesystem.delete_dir(inner)
    return True
