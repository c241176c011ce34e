"""Handle Ctrl-C and SIGTERM while a command runs.

Ctrl-C and SIGTERM raise `KeyboardInterrupt`. A first line is printed at once, because undoing the operation may take
long. A second line is printed when the operation was undone. It says how the command ended.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shoal.cli.exit_codes import InterruptedCommandError

_STDERR = 2
_UNFINISHED = "interrupted before everything was undone: see what is left with `shoal pool list` and `shoal jobs list`"


class _Interrupts:
    """State of the signal handler. The state is global, because Python passes only the signal and the frame to a
    handler.

    Attributes:
        notice: Text to print at the first signal; None outside of `on_interrupt`.
        seen: Number of signals since `on_interrupt` began.
    """

    notice: str | None = None
    seen = 0


def install() -> None:
    """Install the signal handler for SIGTERM and SIGINT (Ctrl-C). The console script calls this function once."""
    signal.signal(signal.SIGTERM, _interrupt)
    # A command that a shell script has started with `&` ignores SIGINT. For such a command no handler is installed, so
    # that it still ignores SIGINT.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def on_interrupt(notice: str, outcome: str) -> Iterator[None]:
    """Print a message when Ctrl-C or SIGTERM interrupts the ``with`` block, and raise InterruptedCommandError.

    Raises:
        InterruptedCommandError: The block was interrupted. The InterruptedCommandError replaces the
            `KeyboardInterrupt`.
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
        # The signal may have interrupted a write to sys.stderr, and a second write to sys.stderr would then fail. So
        # the text is written directly to the file descriptor.
        os.write(_STDERR, f"\ninterrupted: {_Interrupts.notice}\n".encode())
    raise KeyboardInterrupt
