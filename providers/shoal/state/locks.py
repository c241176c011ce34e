"""File locks between processes of one host. Locks between hosts are in the store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import StoreError


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a file and hold it inside the block. It ends with the process at the latest."""
    with open_locked(path, wait=True) as _:
        yield


@contextmanager
def open_locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Try to lock a file, and yield whether the lock is held.

    The file descriptor is not inherited by child processes, so the lock cannot outlive its holder.

    Args:
        path: The file, which is created if needed.
        wait: Wait until the lock is free. Otherwise yield False at once if another process holds it.

    Raises:
        StoreError: The file cannot be created or opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be locked: {error}. Free some disk space, or set SHOAL_HOME to another folder"
        ) from error
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
