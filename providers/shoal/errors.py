"""Define all exceptions that shoal raises. Each exception is a subclass of :class:`ShoalError`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.installation import pip_install
from shoal.secrets.redaction import redact

_MOST_SHOWN = 80


def shown(value: object) -> str:
    """Return the repr of a value for an error message, shortened to 80 characters."""
    try:
        text = repr(value)
    # Python refuses to convert an integer of more than 4300 digits, or a value that is nested too deeply, to text. So
    # the message shows only the type of such a value.
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too long to show"
    # The credentials are removed first, because the beginning of a password would not be recognized.
    text = redact(text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_COLOUR = r"\x1b\[[\d;:]*m"
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
_HIDDEN_CHARACTER = re.compile(_CONTROL)
_COLOUR_OR_HIDDEN_CHARACTER = re.compile(f"{_COLOUR}|{_CONTROL}")


def printable(text: str, *, colours: bool = False) -> str:
    """Escape the characters with which a text from data could control a terminal, or that UTF-8 cannot encode.

    Args:
        text: The text. Line breaks and tabs are kept.
        colours: Whether to keep the sequences that change colours.
    """

    def escaped(match: re.Match[str]) -> str:
        return match[0] if len(match[0]) > 1 else match[0].encode("unicode_escape").decode()

    hidden = _COLOUR_OR_HIDDEN_CHARACTER if colours else _HIDDEN_CHARACTER
    return hidden.sub(escaped, text.replace("\r\n", "\n"))


class ShoalError(Exception):
    """Base class of all errors of shoal.

    Credentials in the message are removed, so that the message can be logged. Characters that control a terminal, or
    that UTF-8 cannot encode, are escaped, so that the message can be printed and stored.

    Attributes:
        permanent: Whether a retry is useless, because the same call would fail again in the same way, or is not
            wanted, because a user has cancelled the job.
    """

    permanent: bool = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(printable(arg)) if isinstance(arg, str) else arg for arg in args))

    def add_note(self, note: str, /) -> None:
        """Add a note, such as the traceback of a worker, without the credentials in it."""
        super().add_note(redact(printable(note)))


class InvalidArgumentError(ShoalError, ValueError):
    """An argument, option or spec is invalid. The call had no effect: nothing was started, and nothing was changed."""

    permanent = True


class MissingExtraError(ShoalError, ImportError):
    """A package that an optional feature needs is not installed.

    Args:
        package: Import name of the missing package.
        extra: Extra of shoal that installs the package; None if no extra does.
        otherwise: What to do without the package; the end of the message.
    """

    permanent = True

    def __init__(self, package: str, extra: str | None, otherwise: str | None = None) -> None:
        command = pip_install(extra) if extra else f"pip install {package}"
        end = f", or {otherwise}" if otherwise else ""
        super().__init__(f"{package} is not installed in this environment: install it with `{command}`{end}")
        self.package = package
        self.extra = extra


class StoreError(ShoalError):
    """The state store cannot be used: unreachable, read-only, corrupt, or written by a newer shoal."""


class StoreUnreachableError(StoreError):
    """The state store does not answer at the moment. The same call may succeed later."""


class FencedError(ShoalError):
    """A change of a lease was rejected, because the lease has expired, was released, or was requested again in the
    meantime; or a change of a study was rejected, because the job's attempt has ended or a later attempt goes on.

    Each request increases the lease's epoch. Only the process with the newest epoch may write, so a process that was
    paused for long cannot interfere with its successor.
    """


class PoolNotFoundError(ShoalError, LookupError):
    """The store has no pool with this name."""

    def __init__(self, name: str, known: list[str]) -> None:
        hint = (
            f"; existing pools: {', '.join(known)}"
            if known
            else "; there are no pools: create one with `shoal pool up`"
        )
        super().__init__(f'pool "{name}" does not exist or is not authorized{hint}')
        self.name = name


class NoPoolError(InvalidArgumentError):
    """No pool was named, and shoal cannot choose one, because the store contains no pool, no pool is up, or several
    pools are up."""

    permanent = False


class JobBusyError(InvalidArgumentError):
    """A job was submitted with the id of an unfinished job that has another spec."""

    permanent = False


class PoolDownError(ShoalError):
    """The pool is not up (start it with ``up()``), or it is local to another host."""


class PoolElsewhereError(PoolDownError):
    """The pool is local to another host: repeat the request on that host."""


class NoTokenError(PoolDownError):
    """There is no file with the pool's token: the pool went down, or another user, or another home, has started it."""


class LeaseEndedError(ShoalError):
    """The run has no lease on the pool any more: the lease has expired, was released, or was ended by its limits."""

    permanent = True


class PoolInUseError(ShoalError):
    """The pool is up, is leased or has unfinished jobs, so it cannot be deleted."""


class PoolUnreachableError(ShoalError):
    """The Ray cluster does not answer, or rejects the request: wrong address, wrong token, or the cluster is down."""


class PoolStoppingError(PoolDownError):
    """The pool is still going down, which takes some seconds. Afterwards the pool can be started again."""


class ScaleError(ShoalError):
    """A pool or lease did not reach the requested number of nodes. A call that requests nodes rolls back its request
    before it raises this error, unless a newer request has replaced it.

    Args:
        message: The reason, in one sentence.
        nodes: Errors of the failed nodes: a dict from the name of a node to its error.
    """

    def __init__(self, message: str, nodes: Mapping[str, str] | None = None) -> None:
        lines = [message, *(f"  {name}: {why}" for name, why in (nodes or {}).items())]
        super().__init__("\n".join(lines))
        self.nodes = {name: redact(why) for name, why in (nodes or {}).items()}


class BudgetError(ShoalError):
    """A lease or a job has used up its budget of node-hours, or would exceed it."""

    permanent = True


class TeamError(ShoalError):
    """A pool, lease or job belongs to another team than the one for which the process acts. Nothing was changed."""

    permanent = True


class CapacityError(ShoalError, RuntimeError):
    """The training requests more nodes, CPUs or GPUs than the pool has, or than became free in time."""

    permanent = True


class UnusableGpuError(CapacityError):
    """The installed library cannot train on the GPU of a node."""


class CapacityTimeoutError(CapacityError):
    """The pool has the nodes, CPUs or GPUs that the training requests, but they did not become free in time."""

    permanent = False


class DataError(ShoalError, ValueError):
    """The dataset cannot be used: missing column, null label, wrong dtype, or a corrupt, missing or empty file."""

    permanent = True


class DataAccessError(DataError):
    """The data could not be read or written this time: the database or the storage does not answer or refuses access,
    the disk is full, or a file was changed meanwhile."""

    permanent = False


class TrainingError(ShoalError, RuntimeError):
    """Training failed. The message contains the first error and the rank on which it occurred.

    The error is a RuntimeError, too, as the errors of PySpark's TorchDistributor are.
    """


class InvalidParamsError(InvalidArgumentError, TrainingError):
    """XGBoost or LightGBM refuses the parameters of the training; the message contains the library's message. No
    worker was started."""


class WorkerLostError(TrainingError):
    """A worker process, or the node on which it ran, died during the training.

    Attributes:
        out_of_memory: Whether the kernel or Ray has ended processes of the training for lack of memory.
    """

    out_of_memory: bool = False


class OutOfMemoryError(TrainingError):
    """The workers of a boosting training had too little memory. A training of the same size would fail again."""

    permanent = True


class JobError(ShoalError):
    """A job could not be submitted, found or cancelled, or its result could not be read.

    Args:
        message: The error message.
        permanent: Whether a retry is useless or not wanted.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class JobNotFoundError(JobError, LookupError):
    """The store has no job with this id."""


class ModelNotFoundError(ShoalError, LookupError):
    """The model registry has no model with this name, or shoal has registered no version of the model."""


class RegistryError(ShoalError):
    """The MLflow model registry does not exist, does not answer, or rejects the request."""


class JobFailedError(JobError, TrainingError):
    """The job ended without a result. The message ends with the cause.

    The error is a TrainingError, too, so that a call raises the same on a pool and in a connected Ray cluster.
    """


class JobCancelledError(JobError):
    """The requested result does not exist, because the job was cancelled.

    The error is permanent if a user has cancelled the job, and not if the run of the job has cancelled it, or no
    process has polled it.
    """
