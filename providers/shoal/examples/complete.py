"""Folders of example data that are there complete or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all is written.

    Args:
        folder: What it will be called.
    """
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # another run may have been first, with the same files
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
