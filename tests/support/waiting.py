"""Waiting on conditions: the one place where tests sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 30.0, every: float = 0.05) -> Any:
    """Wait until `condition` gives something true, and return it.

    Args:
        condition: What is waited for.
        what: Its name in the error.
        seconds: Only ends a test that hangs.
        every: Seconds between two looks; more for a condition that costs a server much to answer.
    """
    until = time.monotonic() + seconds
    while True:
        if result := condition():
            return result
        if time.monotonic() > until:
            raise AssertionError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(every)
