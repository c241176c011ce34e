"""Provide `complete`, which creates a folder atomically, so that the folder never exists with incomplete content."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """Create a temporary folder, and rename it to `folder` when the ``with`` block ends without an exception."""
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            # If the folder exists, another process has already created it with the same files, so the error is ignored.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
