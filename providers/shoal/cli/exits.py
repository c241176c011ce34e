"""Exit codes of the `shoal` command, and the function that selects the exit code for an error."""

from __future__ import annotations

from enum import IntEnum

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
