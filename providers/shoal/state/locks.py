"""File locks between processes of one host. Locks between several hosts are rows in the store (table `locks`)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import StoreError


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a file, and hold the lock inside the ``with`` block.

    If the process dies inside the block, the kernel releases the lock.
    """
    with open_locked(path, wait=True) as _:
        yield


@contextmanager
def open_locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file, and yield True. If `wait` is False and another process holds the lock, yield False instead.

    The lock is released when this process ends, at the latest. Programs that this process starts do not inherit the
    lock.

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
