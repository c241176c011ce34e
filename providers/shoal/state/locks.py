"""Locks between processes of one host, on files. What concerns all hosts is locked in the store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import StoreError


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; it ends with the process at the latest."""
    with open_locked(path, wait=True) as _:
        yield


@contextmanager
def open_locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Try for the lock on ``path``; yields whether it is held.

    The descriptor is not inherited by children, so the lock cannot outlive its holder.

    Raises:
        StoreError: The file cannot be made or opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error}. Free some room, or set SHOAL_HOME elsewhere") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        with suppress(OSError):
            os.close(descriptor)
