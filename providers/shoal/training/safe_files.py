"""Make folders, and read and write files, in a shared folder such as `artifact_location`, without following links.

Other users may be able to write to a shared folder. Through a link there, shoal would write files somewhere else, and a
FIFO there would block its reader for ever. Files that libraries write by path are safe only if the folder is, so the
folders below the shared folder are checked. Nodes with other user ids (containers, NFS) may use the same folders; see
`make_folder`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shoal.errors import InvalidArgumentError

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EVERYBODY_WRITES = stat.S_IWOTH
_FOLDER_MODE, _FILE_MODE = 0o775, 0o664
"""Modes before the umask. With a umask of 0, folders and files must still not be writable for everybody."""


def make_folder(shared: str, folder: str) -> None:
    """Make a folder in a shared folder, with the folders between them, and check those that exist.

    A folder below the shared folder has to be a real folder, no link, and not writable for everybody. If everybody can
    write to the shared folder, it also has to belong to root or to this process's user: the user that the file system
    shows for new files of this process, because NFS may replace user ids. Otherwise only users to whom the owner of the
    shared folder has given access can have made it, so its owner may be any user, such as that of another node.

    Raises:
        InvalidArgumentError: A folder fails the check.
        OSError: A folder cannot be made.
    """
    os.makedirs(shared, exist_ok=True)
    _check(shared, folder, make=True)


def check_folder(shared: str, folder: str) -> None:
    """Check the folders that exist between a shared folder and a folder in it, as :func:`make_folder` does."""
    if os.path.isdir(shared):
        _check(shared, folder, make=False)


def _check(shared: str, folder: str, *, make: bool) -> None:
    path, here = shared, os.open(shared, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_open_to_all = bool(os.fstat(here).st_mode & _EVERYBODY_WRITES)
        for name in Path(folder).relative_to(shared).parts:
            path = f"{path}/{name}"
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, _FOLDER_MODE, dir_fd=here)
            try:
                inner = os.open(name, _FOLDER, dir_fd=here)
            except FileNotFoundError:
                return
            except NotADirectoryError:
                raise InvalidArgumentError(
                    f"{path} is a file or a link, but has to be a folder: {_remedy(path)}"
                ) from None
            os.close(here)
            here = inner
            if why := _why_unsafe(os.fstat(here), shared, is_open_to_all):
                raise InvalidArgumentError(f"{path} {why}: {_remedy(path)}")
    finally:
        os.close(here)


def _why_unsafe(found: os.stat_result, shared: str, is_open_to_all: bool) -> str | None:
    """Return the reason why other users could change files in a folder, as words to put after its path, or None."""
    is_strange = is_open_to_all and found.st_uid not in (0, os.geteuid())
    is_writable = bool(found.st_mode & _EVERYBODY_WRITES)
    if not is_strange and not is_writable:
        return None
    with tempfile.TemporaryFile(dir=shared) as own_file:
        own = os.fstat(own_file.fileno())
    if is_strange and found.st_uid != own.st_uid:
        return f"belongs to user {found.st_uid}, and every user can write to {shared}"
    # The file has mode 0600 unless the file system ignores modes, as CIFS does. Then the mode of a folder says nothing.
    if is_writable and not own.st_mode & _EVERYBODY_WRITES:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}: every user can change the files in it"
    return None


def _remedy(path: str) -> str:
    return (
        f"check its contents and move it away, or run `chmod o-w {path}` if only its mode is wrong, or choose another "
        "location, to which not every user can write"
    )


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Open a new local file under a temporary name, and give it its final name at the end of the ``with`` block.

    A file, link or FIFO with the final name is replaced, never opened. If the block fails, the temporary file is
    removed.
    """
    folder, _, name = path.rpartition("/")
    # The temporary name has a random id. A process id would not be enough, because several threads, or processes on
    # several hosts, may write the same file.
    temporary = f"{name}.{uuid.uuid4().hex}"
    here = os.open(folder or "/", _FOLDER)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, _FILE_MODE, dir_fd=here)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            # A half-written file would keep a full disk full.
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=here)
            raise
    finally:
        os.close(here)


def copy_file(source: str | os.PathLike[str], target: str) -> None:
    """Copy a file to a local path, as :func:`new_file` does. Its folder has to exist."""
    with open(source, "rb") as original, new_file(target) as file:
        shutil.copyfileobj(original, file, 2**20)


def open_file(path: str) -> BinaryIO:
    """Open a local file for reading, unless it is a link, a FIFO or another special file.

    Raises:
        FileNotFoundError: There is no regular file at the path.
        IsADirectoryError: The path is a folder.
        OSError: The file cannot be read.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _irregular(path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise _irregular(path)
    return os.fdopen(descriptor, "rb")


def _irregular(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "No regular file (links and special files are not read)", path)
