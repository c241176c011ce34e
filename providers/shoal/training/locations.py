"""Check the locations of results, and make folders and files there without following links, each folder marked with the
job that made it.

Other users may be able to write to a shared folder such as `artifact_location`. Through a link there, shoal would write
files somewhere else, and a FIFO there would block its reader for ever. Files that libraries write by path are safe only
if the folder is, so the folders below the shared folder are checked. Nodes with other user ids (containers, NFS) may
use the same folders; see `make_folder`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit
from urllib.request import url2pathname

from shoal.data.connections import refuse_storage
from shoal.data.parquet.files import refuse_incomplete_address
from shoal.errors import InvalidArgumentError
from shoal.new_files import SHARED_MODE, create_folder
from shoal.secrets.redaction import HIDDEN, redact_address, redacted_errors

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_FILE = "file://"
SQLITE = "sqlite:///"
"""Prefix of the SQLAlchemy URL of an SQLite file."""


def resolved(location: str, option: str = "artifact_location") -> str:
    """Make a location absolute, so that another process on this host writes to the same place.

    Absolute paths and URIs are returned unchanged. Otherwise the fingerprints of stored jobs would change, because a
    fingerprint depends on the location.

    Raises:
        InvalidArgumentError: The location is blank, an address without a scheme, or a ``file://`` URI with a host.
    """
    if not location.strip():
        raise InvalidArgumentError(f"{option} is blank: give a directory or a URI, or omit this option")
    refuse_incomplete_address(location, option)
    refuse_storage(location, option)
    if location.startswith(_FILE):
        with redacted_errors(location):
            host = urlsplit(location).netloc
        if host not in ("", "localhost"):
            # The host may be a password, for example in file://user:password@/path.
            shown = redact_address(location)
            raise InvalidArgumentError(
                f'{option} "{shown}" contains the host "{urlsplit(shown).netloc or HIDDEN}": write '
                "file:///absolute/path without a host, or a path"
            )
        return location
    if "://" in location or os.path.isabs(location):
        return location
    return os.path.abspath(os.path.expanduser(location))


def absolute_database(url: str) -> str:
    """Make the path in the URL of an SQLite file absolute, for processes with another working directory."""
    if not url.startswith(SQLITE) or url.startswith(f"{SQLITE}/"):
        return url
    return SQLITE + str(Path(url.removeprefix(SQLITE)).absolute())


def local_path(location: str) -> str:
    """Return the path of a ``file://`` URI; any other location is returned unchanged."""
    return url2pathname(urlsplit(location).path) if location.startswith(_FILE) else location


def filesystem(location: str) -> tuple[AbstractFileSystem, str]:
    """Return fsspec's filesystem for a path or URI, and the path in this filesystem, without a slash at its end.

    The filesystem does not cache lists of files, because other processes write to the location at the same time.
    """
    import fsspec

    fs, root = fsspec.core.url_to_fs(location, use_listings_cache=False)
    return fs, str(root).rstrip("/")


def names_in(folder: str) -> list[str]:
    """Return the sorted names of the files and folders in a folder; an empty list if there is no such folder."""
    with redacted_errors(folder):
        fs, root = filesystem(folder)
        try:
            return sorted(str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False))
        except FileNotFoundError:
            return []


def is_local(fs: AbstractFileSystem) -> bool:
    """Return whether fsspec's filesystem is the local one, also if its files are named by a ``file://`` URI."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def try_out(location: str, option: str = "artifact_location") -> None:
    """Test that files can be written to a location, and create the folder if it does not exist.

    The test writes a small file and removes it.

    Raises:
        InvalidArgumentError: The location cannot be written to; the message contains the cause.
    """
    refuse_incomplete_address(location, option)
    try:
        if "://" in location:
            with redacted_errors(location):
                fs, root = filesystem(location)
                trial = f"{root}/.shoal-trial-{uuid.uuid4().hex}"
                fs.makedirs(root, exist_ok=True)
                fs.pipe_file(trial, b"shoal")
                fs.rm_file(trial)
        else:
            create_folder(Path(location), SHARED_MODE)
            with tempfile.NamedTemporaryFile(dir=location, prefix=".shoal-trial-") as file:
                file.write(b"shoal")
    except Exception as error:
        # fsspec's filesystems raise exceptions of many types, so all types are caught.
        raise InvalidArgumentError(
            f'{option} "{redact_address(location)}" cannot be written to: {type(error).__name__}: {error}. '
            "Choose a directory or URI to which this host can write"
        ) from None


_PATH = getattr(os, "O_PATH", os.O_RDONLY)  # macOS has no O_PATH
_FOLDER = _PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EVERYBODY_WRITES = stat.S_IWOTH
_FILE_MODE = 0o664
"""Mode before the umask. With a umask of 0, files must still not be writable for everybody."""


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
    create_folder(Path(shared), SHARED_MODE)
    _check(shared, folder, make=True)


def _check(shared: str, folder: str, *, make: bool) -> None:
    path, here = shared, os.open(shared, _PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_open_to_all = bool(os.fstat(here).st_mode & _EVERYBODY_WRITES)
        for name in Path(folder).relative_to(shared).parts:
            path = f"{path}/{name}"
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, SHARED_MODE, dir_fd=here)
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


MARKER = ".shoal-job"
"""Name of the marker file, which contains the fields of a :class:`Claim` as JSON."""

_MAX_MARKER_BYTES = 4096
_OTHER_PLACE = "move it away, or choose another artifact_location or job_id"


@dataclass(frozen=True, slots=True)
class Claim:
    """Identity of one attempt of a job. The attempt writes its claim into the marker file of each artifact folder.

    Args:
        job_id: Id of the job.
        owner: Text that distinguishes jobs with the same id, for example of two stores or two users.
        attempt: Number of the attempt, from 1.
    """

    job_id: str
    owner: str
    attempt: int = 1

    def check(self, folder: str, *, shared: str | None = None, beside: Collection[str] = ()) -> bool:
        """Check that this attempt may create or replace an artifact folder, and return whether the folder exists.

        An attempt may replace an empty folder and a folder of the same job, unless a newer attempt created the folder.

        Raises:
            InvalidArgumentError: The location is a file, a link, or a folder that this attempt must not replace, or
                another user can change the folder.
        """
        fs, root = filesystem(folder)
        if is_local(fs) and os.path.isdir(top := _shared(root, shared)):
            _check(top, root, make=False)
        linked = _is_link(fs, root)
        if not linked and not fs.exists(root):
            return False
        if linked or not fs.isdir(root):
            raise InvalidArgumentError(f"{folder} is a file or a link, but has to be a folder: {_OTHER_PLACE}")
        found = _read(fs, root)
        names = {str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)} - set(beside)
        if found is None and all(name == MARKER or name.startswith(f"{MARKER}.") for name in names):
            # The folder is empty, or contains only an incomplete marker file, so this attempt may replace the folder.
            return True
        if found is None or (found.job_id, found.owner) != (self.job_id, self.owner):
            raise InvalidArgumentError(
                f'{folder} is not empty, and job "{self.job_id}" did not create this folder (the file {MARKER} in it '
                f"is missing or belongs to another job): {_OTHER_PLACE}"
            )
        if found.attempt > self.attempt:
            raise InvalidArgumentError(
                f'{folder} belongs to attempt {found.attempt} of job "{self.job_id}", so the older attempt '
                f"{self.attempt} must not replace the folder: use the result of the newest attempt"
            )
        return True

    def has_marked(self, folder: str) -> bool:
        """Return whether an artifact folder exists and was marked by this attempt of the job."""
        return read_claim(folder) == self

    def take(self, folder: str, *, shared: str | None = None) -> None:
        """Replace an artifact folder by a folder that contains only the marker file of this attempt.

        Raises:
            InvalidArgumentError: This attempt must not replace the folder; see :meth:`check`.
        """
        self.check(folder, shared=shared)
        self.remove(folder)
        self.mark(folder, shared=shared)

    def mark(self, folder: str, *, shared: str | None = None) -> None:
        """Create an artifact folder if it does not exist, and write this attempt's marker file into it.

        Raises:
            InvalidArgumentError: Another user can change the folder.
        """
        fs, root = filesystem(folder)
        content = json.dumps(asdict(self)).encode()
        if is_local(fs):
            make_folder(_shared(root, shared), root)
            with new_file(f"{root}/{MARKER}") as file:
                file.write(content)
        else:
            fs.makedirs(root, exist_ok=True)
            fs.pipe_file(f"{root}/{MARKER}", content)

    def remove(self, folder: str) -> None:
        """Remove an artifact folder with all its files, if it exists.

        Raises:
            InvalidArgumentError: This attempt must not replace the folder; see :meth:`check`.
        """
        if not self.check(folder):
            return
        # The marker file is removed last. If this process is killed before the end, the marker file still shows that
        # the folder belongs to this job, so the next attempt can remove the rest.
        fs, root = filesystem(folder)
        if is_local(fs):
            for path in Path(root).iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != MARKER:
                    path.unlink()
            shutil.rmtree(root)
            return
        # The files are removed one by one with `rm_file`, because `fs.rm` treats a name with "*", "?" or "[" as a
        # pattern and removes all files that match the pattern.
        found: dict[str, Any] = fs.find(root, withdirs=True, detail=True)
        marker = f"{root}/{MARKER}"
        for name, info in found.items():
            if info["type"] != "directory" and name != marker:
                fs.rm_file(name)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(marker)
        folders = {name for name, info in found.items() if info["type"] == "directory"} | {root}
        for name in sorted(folders, reverse=True):
            # rmdir() fails if the folder does not exist any more, or if another process has written a file into it.
            # Such an error is ignored, so a folder that is not empty stays.
            with contextlib.suppress(OSError):
                fs.rmdir(name)


def read_claim(folder: str) -> Claim | None:
    """Read from an artifact folder's marker file which job and attempt created the folder.

    Returns:
        The job and attempt; None if the folder has no valid marker file, or if the folder is a link.
    """
    fs, root = filesystem(folder)
    return None if _is_link(fs, root) else _read(fs, root)


def _is_link(fs: AbstractFileSystem, root: str) -> bool:
    return is_local(fs) and Path(root).is_symlink()


def _shared(root: str, shared: str | None) -> str:
    return filesystem(shared)[1] or "/" if shared else str(Path(root).parent)


def _read(fs: AbstractFileSystem, root: str) -> Claim | None:
    path = f"{root}/{MARKER}"
    try:
        if is_local(fs):
            with open_file(path) as file:
                fields = json.loads(file.read(_MAX_MARKER_BYTES))
        else:
            fields = json.loads(fs.cat_file(path, end=_MAX_MARKER_BYTES))
        return Claim(str(fields["job_id"]), str(fields["owner"]), int(fields["attempt"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
