"""Say how a process has ended."""

from __future__ import annotations

import signal


def how_ended(code: int) -> str:
    """Return the end of a process as a phrase, such as "was killed by SIGSEGV" or "ended with exit code 3"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"
