"""Unpack the tables that ``write_with_spark.py`` has written, and read what Spark has read from them."""

from __future__ import annotations

import datetime
import json
import math
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PATH_LENGTH = 160
"""Length of the path of the folder with all tables. Longer than the temporary folders of tests."""


def padded(folder: str) -> str:
    """Append a name to the path of a folder, so that the whole path has the required length."""
    missing = PATH_LENGTH - len(folder.encode()) - 1
    assert missing > 0, f"{folder} is longer than {PATH_LENGTH} bytes"
    return f"{folder}/{'t' * missing}"


WRITTEN_AT = padded("/tmp/tables-of-spark")


def unpack(folder: Path) -> Path:
    """Unpack all tables below a folder, and replace the path at which Spark has written them."""
    root = Path(padded(str(folder)))
    with tarfile.open(HERE / "tables.tar.xz") as archive:
        archive.extractall(root, filter="data")
    for path in (root / "iceberg").rglob("*"):
        if path.is_file() and WRITTEN_AT.encode() in (content := path.read_bytes()):
            path.write_bytes(content.replace(WRITTEN_AT.encode(), str(root).encode()))
    return root


def cases() -> list[dict[str, Any]]:
    """Return what Spark has read: one dict for each table and version."""
    found: list[dict[str, Any]] = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    return found


def plain(value: Any) -> Any:
    """Return a value that shoal has read in the form of ``expected.json``."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, list):
        found = [plain(item) for item in value]
        # Arrow gives a map as a list of pairs.
        return sorted(found) if value and isinstance(value[0], tuple) else found
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime.datetime):
        return str(value.replace(tzinfo=None))
    if isinstance(value, datetime.date | Decimal):
        return str(value)
    return value.hex() if isinstance(value, bytes) else value
