"""Waiting on conditions: the one place where tests sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Wait until `condition` gives something true, and return it; `seconds` only ends a test that hangs."""
    until = time.monotonic() + seconds
    while True:
        if result := condition():
            return result
        if time.monotonic() > until:
            raise AssertionError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.05)  # polling
