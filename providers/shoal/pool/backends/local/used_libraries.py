"""Record which libraries the driver of the last job on this host imports, so that the head of the next pool imports
them before its first job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress

from shoal.errors import StoreError
from shoal.state.home import per_host

_NAME = "libraries"


def record(libraries: Iterable[str]) -> None:
    """Replace the record. If the file cannot be written, keep the old record."""
    with suppress(OSError, StoreError):
        partial = per_host(_NAME, "json.new")
        partial.write_text(json.dumps(sorted(libraries)))
        partial.replace(per_host(_NAME, "json"))


def recorded() -> list[str]:
    """Return the recorded libraries; empty if there is no record, or if it cannot be read."""
    with suppress(OSError, StoreError, ValueError):
        return [str(name) for name in json.loads(per_host(_NAME, "json").read_text())]
    return []
