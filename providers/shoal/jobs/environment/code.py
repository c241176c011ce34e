"""Send the user's Python code (files and folders) to the pool, as one zip archive."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.errors import InvalidArgumentError
from shoal.jobs.files import code_store
from shoal.training.pytorch.program import MAX_BYTES

_STORED = re.compile(r".*/_code/[0-9a-f]{64}")
_DATE = (1980, 1, 1, 0, 0, 0)
"""Earliest time in a zip archive. All files have it, so that the same code gives the same archive."""


def stored(paths: Sequence[str]) -> tuple[str, ...]:
    """Pack folders and files with code into one archive that the driver can read, and return the archive's path.

    The archive's name is the digest of its content. So the name is equal if the same job is submitted again.

    Raises:
        InvalidArgumentError: A path does not exist or cannot be imported under its name, or the code is too large.
    """
    if not paths or all(_STORED.fullmatch(path) for path in paths):
        return tuple(paths)
    archive = _packed(paths)
    if len(archive) > MAX_BYTES:
        raise InvalidArgumentError(
            f"run_config.code is {len(archive) / 2**20:.0f} MiB large, but the limit is {MAX_BYTES / 2**20:.0f} MiB: "
            "name only folders with code, and pass data as datasets"
        )
    return (code_store.store(archive),)


def unpack(paths: Sequence[str], folder: Path) -> None:
    """Unpack the archives from :func:`stored` into a folder, so that Python can import the code from this folder.

    Raises:
        JobError: An archive cannot be read, or was changed.
    """
    for path in paths:
        with zipfile.ZipFile(io.BytesIO(code_store.read(path))) as archive:
            archive.extractall(folder)


def _packed(paths: Sequence[str]) -> bytes:
    content = io.BytesIO()
    names: set[str] = set()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({Path(path).expanduser().absolute() for path in paths}):
            name = _module(path)
            if name in names:
                raise InvalidArgumentError(f'run_config.code has two modules called "{name}": rename one of them')
            names.add(name)
            for file in _files(path):
                add_to_zip(archive, str(file.relative_to(path.parent)), file.read_bytes(), mode=0o644)
    return content.getvalue()


def add_to_zip(archive: zipfile.ZipFile, name: str, content: bytes, *, mode: int) -> None:
    """Add a file to an archive. A file without permissions would be unpacked as an unreadable one."""
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = mode << 16
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)


def _module(path: Path) -> str:
    """Return the name under which a folder or a .py file can be imported; the file's name of other files."""
    if not path.exists():
        raise InvalidArgumentError(
            f'run_config.code: "{path}" does not exist: give the path of a package, such as ./mypkg, or of a .py file'
        )
    name = path.name if path.is_dir() else path.name.removesuffix(".py")
    if path.is_file() and path.suffix != ".py":
        return path.name
    if not name.isidentifier():
        raise InvalidArgumentError(
            f'run_config.code: "{path}" cannot be imported: give the folder of a package, such as ./mypkg, or a .py '
            "file. Its name may contain only letters, digits and _, and must not begin with a digit"
        )
    return name


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a package; hidden files, such as those of version control, and bytecode are left out."""
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield file
