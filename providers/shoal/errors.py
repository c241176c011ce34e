"""Every exception that shoal raises on purpose. All derive from :class:`ShoalError`."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.redaction import redact

_MOST_SHOWN = 80


def shown(value: object) -> str:
    """A value as a message repeats it: short, whatever it is."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4300 digits; nested without end
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class ShoalError(Exception):
    """Base of all of shoal's errors: catch this to catch them all.

    Credentials in its message are hidden, and what UTF-8 cannot encode is escaped: it can be printed and stored.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(_printable(arg)) if isinstance(arg, str) else arg for arg in args))


class InvalidArgumentError(ShoalError, ValueError):
    """An argument, option or spec is wrong; nothing was started."""


class MissingExtraError(ShoalError, ImportError):
    """A package that an optional part needs is not installed.

    Args:
        package: The import name that was not found.
        extra: The extra of shoal that brings it; None: it is installed by its own name.
    """

    def __init__(self, package: str, extra: str | None) -> None:
        command = f'pip install "shoal[{extra}]"' if extra else f"pip install {package}"
        super().__init__(f"{package} is not installed in this environment: install it with `{command}`")
        self.package = package
        self.extra = extra


class StoreError(ShoalError):
    """The state store cannot be used: unreachable, read-only, corrupt, or written by a newer shoal."""


class StoreUnreachableError(StoreError):
    """It does not answer now; asked again later it may."""


class FencedError(ShoalError):
    """A write came from a holder whose epoch is no longer the newest; nothing was changed."""


class PoolNotFoundError(ShoalError, LookupError):
    """No pool of that name in this store."""

    def __init__(self, name: str, known: list[str]) -> None:
        hint = f"; pools here: {', '.join(known)}" if known else "; there is no pool here: `shoal pool up` makes one"
        super().__init__(f'pool "{name}" does not exist or is not authorized{hint}')
        self.name = name


class NoPoolError(InvalidArgumentError):
    """No pool was named, and there is none to be meant."""


class PoolDownError(ShoalError):
    """The pool exists but is down, or its host is another one; only ``up()`` starts it."""


class PoolElsewhereError(PoolDownError):
    """The pool is bound to another host, and what was asked can only be done there.

    Args:
        message: What was refused.
        host: Name of that host.
    """

    def __init__(self, message: str, host: str) -> None:
        super().__init__(message)
        self.host = host


class PoolUnreachableError(ShoalError):
    """What runs the pool's nodes does not answer, or refuses us: a wrong address, a wrong token, or it is down."""


class PoolStoppingError(PoolDownError):
    """The pool is on its way down, which takes seconds; it can be brought up again after."""


class ScaleError(ShoalError):
    """A scale operation did not reach its size and was rolled back.

    Args:
        message: What happened, in one sentence.
        nodes: Node name -> what went wrong on it.
    """

    def __init__(self, message: str, nodes: Mapping[str, str] | None = None) -> None:
        lines = [message, *(f"  {name}: {why}" for name, why in (nodes or {}).items())]
        super().__init__("\n".join(lines))
        self.nodes = {name: redact(why) for name, why in (nodes or {}).items()}


class CapacityError(ShoalError):
    """The training asks for more nodes, CPUs or GPUs than the pool has or frees in time."""


class DataError(ShoalError, ValueError):
    """The dataset cannot be used: missing column, null label, wrong dtype, corrupt, vanished or empty file."""


class TrainingError(ShoalError):
    """Training failed; the message is the first cause and names its rank."""


class WorkerLostError(TrainingError):
    """A worker or its node died while training."""


class JobError(ShoalError):
    """A job could not be submitted, found, cancelled or collected."""


class JobNotFoundError(JobError, LookupError):
    """No job of that id in this store."""


class JobFailedError(JobError):
    """The job ended without a result; the message ends with the cause."""


class JobCancelledError(JobError):
    """The job was cancelled."""
