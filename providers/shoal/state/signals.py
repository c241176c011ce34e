"""Delay signal handlers, such as the handler of Ctrl-C, until a transaction has ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_RAISING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals whose handlers may raise an exception: SIGINT (Ctrl-C), SIGTERM (a request to end), and SIGALRM, which
workflow engines use for the timeout of a task."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals during a short ``with`` block. The handlers of these signals are called when the block has ended.

    Without this delay, a signal handler could raise an exception while a transaction is being opened. The transaction
    would then stay open as long as the exception's traceback exists. If the code that handles the exception needs the
    database, it would wait forever for a lock that its own process holds.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python runs signal handlers only in the main thread, so in other threads there is nothing to delay.
        yield
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
