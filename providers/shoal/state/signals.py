"""Putting off what a signal raises until a transaction is through."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_RAISING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Ctrl-C, being ended politely, and the alarm with which workflow engines time a task out."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a short block to its end, then handle the signals that came meanwhile.

    An exception raised by a signal handler in the middle of opening a transaction leaves it open for as long as the
    traceback lives, and whoever handles the exception then waits in vain for the database that it holds itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers in the main thread alone
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
