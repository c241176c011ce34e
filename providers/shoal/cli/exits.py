"""How the command ends: its exit codes, and which error means which. The one place that knows."""

from __future__ import annotations

from enum import IntEnum

from shoal.errors import CapacityError, InvalidArgumentError, JobNotFoundError, PoolNotFoundError, ScaleError


class ExitCode(IntEnum):
    """What a script that calls `shoal` can tell apart."""

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
    ExitCode.NOT_FOUND: "no such pool or job",
    ExitCode.NO_CAPACITY: "the size was not reached and was rolled back, or there is no capacity for the training",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C, SIGTERM)",
}

EPILOG = "\n\n".join(["**Exit codes**", *(f"- {code.value}: {meaning}" for code, meaning in MEANINGS.items())])
"""For `--help`."""


class InterruptedCommandError(Exception):
    """The command was interrupted; the message says what became of what it had started."""


def exit_code(error: BaseException) -> ExitCode:
    """The code that an error ends the command with."""
    match error:
        case InvalidArgumentError():
            return ExitCode.WRONG_ARGUMENT
        case PoolNotFoundError() | JobNotFoundError():
            return ExitCode.NOT_FOUND
        case ScaleError() | CapacityError():
            return ExitCode.NO_CAPACITY
        case InterruptedCommandError() | KeyboardInterrupt():
            return ExitCode.INTERRUPTED
    return ExitCode.FAILED
