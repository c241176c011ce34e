"""Delay signal handlers until a transaction has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_RAISING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals whose handlers may raise: Ctrl-C, a request to end, and the alarm for task timeouts in workflow engines."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a short block to its end, then handle the signals that arrived in it.

    If a signal handler raised while a transaction is being opened, the transaction would stay open as long as the
    traceback exists. The code that handles the exception would then wait forever for the database that its own process
    has locked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers only in the main thread
        return
    came: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    try:
        for number in _RAISING:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, note)
        yield
    finally:
        for restored, handler in handlers.items():
            signal.signal(restored, handler)
        for waiting in came:
            handlers[waiting](waiting, None)
