"""How a command ends: its exit code, and what it does when a signal interrupts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType

from shoal.errors import (
    CapacityError,
    InvalidArgumentError,
    JobNotFoundError,
    ModelNotFoundError,
    PoolNotFoundError,
    ScaleError,
)


class ExitCode(IntEnum):
    """Exit codes of the `shoal` command. Scripts may rely on these codes, so their numbers do not change."""

    DONE = 0
    FAILED = 1
    WRONG_ARGUMENT = 2
    NOT_FOUND = 3
    NO_CAPACITY = 4
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.WRONG_ARGUMENT: "wrong usage or argument; nothing was started",
    ExitCode.NOT_FOUND: "the pool, job or model does not exist",
    ExitCode.NO_CAPACITY: "the pool did not reach the size and was rolled back, or the training does not fit there",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C, SIGTERM)",
}

EPILOG = "\n\n".join(["**Exit codes**", *(f"- {code.value}: {meaning}" for code, meaning in MEANINGS.items())])
"""Text at the end of `shoal --help`."""


class InterruptedCommandError(Exception):
    """The command was interrupted. The message says what happened to the operation that the command had started."""


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code of the `shoal` command after an error. The code is FAILED unless the type of the error has
    its own code."""
    match error:
        case InvalidArgumentError():
            return ExitCode.WRONG_ARGUMENT
        case PoolNotFoundError() | JobNotFoundError() | ModelNotFoundError():
            return ExitCode.NOT_FOUND
        case ScaleError() | CapacityError():
            return ExitCode.NO_CAPACITY
        case InterruptedCommandError() | KeyboardInterrupt():
            return ExitCode.INTERRUPTED
    return ExitCode.FAILED


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
