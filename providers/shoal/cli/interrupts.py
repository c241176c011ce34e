"""Ctrl-C and SIGTERM: both are a `KeyboardInterrupt`, and a line says what they set off and what became of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shoal.cli.exits import InterruptedCommandError

_STDERR = 2
_UNFINISHED = "interrupted again before all was undone: `shoal pool list` and `shoal jobs list` show what is there"


class _Interrupts:
    """What the signal handler has to know: it gets no argument of ours."""

    notice: str | None = None
    seen = 0


def install() -> None:
    """Treat SIGTERM as Ctrl-C; called once, by the console script."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored: started with `&` by a script
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def on_interrupt(notice: str, outcome: str) -> Iterator[None]:
    """Say what an interrupt of this block does.

    Args:
        notice: Shown at once, because undoing takes its time.
        outcome: Shown at the end.

    Raises:
        InterruptedCommandError: In place of `KeyboardInterrupt`.
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
        # Not through sys.stderr: the signal may have come in the middle of a write to it.
        os.write(_STDERR, f"\ninterrupted: {_Interrupts.notice}\n".encode())
    raise KeyboardInterrupt
