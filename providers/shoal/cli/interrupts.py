"""Handle Ctrl-C and SIGTERM: both raise `KeyboardInterrupt`, and one line each tells what happens and the outcome."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shoal.cli.exits import InterruptedCommandError

_STDERR = 2
_UNFINISHED = "interrupted before everything was undone: see what is left with `shoal pool list` and `shoal jobs list`"


class _Interrupts:
    """State of the signal handler, kept at module level because a handler gets no arguments of ours."""

    notice: str | None = None
    seen = 0


def install() -> None:
    """Treat SIGTERM like Ctrl-C; the console script calls this function once."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored if a script started it with `&`
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def on_interrupt(notice: str, outcome: str) -> Iterator[None]:
    """Print messages when the block is interrupted.

    Args:
        notice: Printed at once, because undoing may take long.
        outcome: Message of the raised error, printed at the end.

    Raises:
        InterruptedCommandError: The block was interrupted; raised instead of `KeyboardInterrupt`.
    """
    _Interrupts.notice, _Interrupts.seen = notice, 0
    try:
        yield
    except KeyboardInterrupt:
        if _Interrupts.seen > 1:
            outcome = _UNFINISHED
        raise InterruptedCommandError(outcome) from None
    finally:
        _Interrupts.notice = None


def _interrupt(number: int, frame: FrameType | None) -> None:
    _Interrupts.seen += 1
    if _Interrupts.notice and _Interrupts.seen == 1:
        # sys.stderr is not used, because the signal may have interrupted a write to it.
        os.write(_STDERR, f"\ninterrupted: {_Interrupts.notice}\n".encode())
    raise KeyboardInterrupt
