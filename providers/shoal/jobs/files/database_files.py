"""Keep the results of jobs in the store, for pools whose nodes share no other storage with the submitter.

fsspec finds this filesystem through an entry point of the package, so that `shoal-store://` URIs work like all other
URIs.
"""

from __future__ import annotations

import errno
import io
import time
from typing import Any

from fsspec.spec import AbstractFileSystem
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from shoal.errors import InvalidArgumentError, JobError
from shoal.state import Store
from shoal.state.schema import StoredFile

MAX_BYTES = 32 * 2**20
"""Largest size of one file in bytes. All other writers of the store have to wait until the file is written."""

_MISSING = "the store has no such file"


class StoreFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Filesystem whose files are rows of the store. Folders exist as long as they contain files."""

    protocol = "shoal-store"

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return the files and folders in a folder, or the file at a path."""
        path = self._strip_protocol(path)
        found: dict[str, dict[str, Any]] = {}
        query = select(StoredFile.path, func.length(StoredFile.content)).order_by(StoredFile.path)
        for name, size in _store().rows(query.where(_is_at_or_under(path))):
            inside = name.removeprefix(f"{path}/") if path else name
            first, is_folder, _rest = inside.partition("/")
            if name != path and is_folder:
                folder = f"{path}/{first}".lstrip("/")
                found[folder] = {"name": folder, "size": 0, "type": "directory"}
            else:
                found[name] = {"name": name, "size": size, "type": "file"}
        if not found and path:
            raise FileNotFoundError(errno.ENOENT, _MISSING, path)
        return list(found.values()) if detail else list(found)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return a dict with name, size and type of a file or folder."""
        path = self._strip_protocol(path)
        inside: list[dict[str, Any]] = self.ls(path)
        if [each["name"] for each in inside] == [path]:
            return inside[0]
        return {"name": path, "size": 0, "type": "directory"}

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        with _store().transaction() as session:
            if (file := session.get(StoredFile, path)) is None:
                raise FileNotFoundError(errno.ENOENT, _MISSING, path)
            session.delete(file)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode != "rb":
            return _Written(path)
        if (file := _store().get(StoredFile, path)) is None:
            raise FileNotFoundError(errno.ENOENT, _MISSING, path)
        return io.BytesIO(file.content)


class _Written(io.BytesIO):
    """Buffer for the content of a new file. The content is written into the store when the buffer is closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            if len(content) > MAX_BYTES:
                raise InvalidArgumentError(
                    f"{self._path.rpartition('/')[2]} is {len(content) / 2**20:.0f} MiB large, but the store keeps "
                    f"results of at most {MAX_BYTES / 2**20:.0f} MiB per file: set run_config.artifact_location to a "
                    "URI in an object store, such as s3://bucket/folder"
                )
            with _store().transaction() as session:
                session.merge(StoredFile(path=self._path, content=content, written_at=time.time()))


def remove_folder(session: Session, folder: str) -> None:
    """Remove a folder's files in the caller's transaction."""
    session.execute(delete(StoredFile).where(_is_at_or_under(StoreFileSystem._strip_protocol(folder))))


def _is_at_or_under(path: str) -> Any:
    return (StoredFile.path == path) | StoredFile.path.startswith(f"{path}/", autoescape=True) if path else True


def _store() -> Store:
    """Return the store."""
    store = Store(migrate=False)
    if not store.exists():
        raise JobError(
            "the results of the job are kept in the state store, but the store cannot be used on this node: set "
            "run_config.artifact_location to a URI in an object store, such as s3://bucket/folder, or set "
            "SHOAL_STATE_URL on all nodes"
        )
    return store
