"""Define the worker of a gang, which runs functions and returns their results or errors, and the driver's handle of all
workers (`Workers`).

A worker runs in a Ray actor, or in a process without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.planning import GangPosition
from shoal.errors import DataError, InvalidArgumentError, TrainingError
from shoal.lazy_imports import cloudpickle
from shoal.secrets.hidden_output import SECRETS, hide_output
from shoal.secrets.known_secrets import KnownSecrets
from shoal.secrets.redaction import hiding
from shoal.training.gang.connection import DriverConnection
from shoal.training.gang.local_node import LocalNode, NodeWatch
from shoal.training.gang.placement import Seat
from shoal.training.host import memory, own_process
from shoal.training.host.imports import import_lean
from shoal.training.host.own_process import WORKER, ending_forks, set_title
from shoal.training.reporting import GangContext, set_gang_context

_Sent = DataError | TrainingError | InvalidArgumentError

_SHOALS_OWN = {DataError.__module__, __name__}


class PeerError(TrainingError):
    """Error of a worker that could not reach another worker; the driver then searches for the error of the other
    worker."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Worker as error messages name it. `node_id` is Ray's id of the node, or without Ray that of the node's row."""

    rank: int
    node: str
    pid: int
    node_id: str

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Place:
    """Data that a new worker gets from the driver: its position in the gang, and the driver's address to connect to.

    `host` and `port` are those of the driver's `WorkerConnections`. `token` is the secret text of the gang, which the
    worker sends first to identify itself.
    """

    rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Joined:
    """Result of :meth:`Worker.join`. `own_folder` is the temporary working folder that the worker has created on its
    node; None if it uses the job's folder."""

    pid: int
    own_folder: str | None


@dataclass(frozen=True, slots=True)
class Success:
    """Result of a successful function call in a worker: the function's return value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Result of a failed function call in a worker. The driver can unpickle this object without the worker's modules.

    Args:
        error: The exception itself if it is a DataError, TrainingError or InvalidArgumentError of shoal; an error of
            shoal's own class if the driver could not use the exception; else None.
    """

    summary: str
    traceback: str
    error: _Sent | None


@dataclass(frozen=True, slots=True)
class Lost:
    """Outcome of a function call whose worker died before the function returned.

    Args:
        out_of_memory: Message about the memory of the worker's node, if the worker was killed because memory ran out.
        exit_code: Exit code of the worker's process, or minus the signal that ended it; None if it is not known.
    """

    reason: str
    out_of_memory: str | None = None
    exit_code: int | None = None


class Worker:
    """Worker of a gang. :meth:`join` sets its rank, and :meth:`run` calls functions.

    The constructor takes no arguments. Ray loads NumPy and Arrow for a call with arguments, and `trim_memory` has to
    run before Arrow is loaded.
    """

    def __init__(self) -> None:
        self._driver: DriverConnection | None = None
        self._until_end = contextlib.ExitStack()

    def trim_memory(self) -> None:
        """Make this process return freed memory to the operating system; must be called before Arrow is loaded."""
        memory.trim_memory()

    def join(self, place: Place, env: Mapping[str, str]) -> Joined:
        """Connect this Ray actor to the driver, and store the rank and the connection for later function calls."""
        # Ray writes the output of its workers into files on their nodes.
        if secrets := _secrets(env):
            hide_output(secrets)
        return self._join(place, env)

    def join_as_child(self, place: Place, env: Mapping[str, str], node: LocalNode) -> Joined:
        """Connect this process, which the driver has started, to the driver as :meth:`join` does.

        `node` is the node on which the CPUs of this worker are reserved.
        """
        set_title(f"{WORKER} {place.rank} of {place.world_size}")
        return self._join(place, env, node.enter())

    def _join(self, place: Place, env: Mapping[str, str], node: NodeWatch | None = None) -> Joined:
        # Ray's handler of SIGTERM raises SystemExit in the running function. User code may catch it, or the end would
        # count as an error of the function. With the default handler the process ends, and counts as a lost worker.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        own_process.forget_exit_handlers()
        os.environ.update({name: value for name, value in env.items() if name != SECRETS})
        own_folder = own_process.enter_folder(env["PWD"], place.token) if "PWD" in env else None
        self._until_end.enter_context(hiding(KnownSecrets(_secrets(env)).hide))
        self._driver = driver = DriverConnection(place.host, place.port, place.token, place.rank, node)
        position = GangPosition(place.rank, place.world_size)
        set_gang_context(GangContext(position, place.local_world_size, driver.log, driver.note, driver.ask))
        return Joined(os.getpid(), own_folder)

    def preload(self, modules: Sequence[str], complete: bool) -> None:
        """Import modules in advance."""
        import_lean(modules, complete=complete)

    def run(self, function: Callable[..., Any], args: Sequence[Any]) -> Success | Failure:
        """Call a function and return its result as a `Success`, or its error as a `Failure`."""
        assert self._driver is not None
        try:
            with ending_forks():
                return Success(function(*args))
        except BaseException as exc:  # also KeyboardInterrupt and SystemExit, which would end this process
            summary = "".join(traceback.format_exception_only(exc)).strip()
            error = _sendable(exc, summary) if isinstance(exc, _Sent) else None
            return Failure(summary, traceback.format_exc(), error)
        finally:
            self._driver.done()


def _secrets(env: Mapping[str, str]) -> list[str]:
    return list(json.loads(env.get(SECRETS, "[]")))


def _sendable(error: _Sent, summary: str) -> _Sent:
    """Return the error if the driver can unpickle and repeat it; else an error of its nearest class of shoal."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
        type(error)(str(error))  # the driver creates the error again, with the rank in its message
    except BaseException:  # the constructor of a user's class may need other arguments than the message
        own: type[_Sent] = next(base for base in type(error).__mro__ if base.__module__ in _SHOALS_OWN)
        return own(summary)
    return error


Answered = Callable[[int, Success | Failure | Lost], None]
"""Type of a function that receives a worker's rank and the outcome of the worker's call. The function may be called
from any thread."""


class Workers(ABC):
    """Processes of a gang's workers; each process contains a `Worker`."""

    seats: Sequence[Seat]
    """Placement of each worker, by rank."""
    host: str
    """Address of the driver that all nodes can reach."""
    listen_host: str
    """Address at which the driver accepts the workers' sockets."""

    def join(self, places: Sequence[Place], env: Mapping[str, str], timeout: float) -> Iterator[Joined]:
        """Start the workers, connect them to the driver, and yield each worker's `Joined` in the order of the ranks.

        Raises:
            WorkerLostError: A worker died, or did not answer in time.
        """
        deadline = time.monotonic() + timeout
        joins = [self._begin(place, env) for place in places]
        for rank, join in enumerate(joins):
            yield self._joined(rank, join, deadline - time.monotonic(), timeout)

    def replace(self, rank: int, place: Place, env: Mapping[str, str], timeout: float) -> Joined:
        """Start a worker in the place of one that has ended, on the same node.

        Raises:
            WorkerLostError: The node has ended, or the worker died or did not answer in time.
        """
        self._end(rank)
        return self._joined(rank, self._begin(place, env), timeout, timeout)

    @abstractmethod
    def _begin(self, place: Place, env: Mapping[str, str]) -> Any:
        """Start a worker, and begin to connect it to the driver."""

    @abstractmethod
    def _joined(self, rank: int, join: Any, left: float, timeout: float) -> Joined:
        """Wait until a worker has connected, for `left` seconds of the `timeout`."""

    @abstractmethod
    def _end(self, rank: int) -> None:
        """End a worker that will be replaced."""

    @abstractmethod
    def preload(self, modules: Sequence[str], complete: bool, ranks: Iterable[int]) -> None:
        """Tell the workers of these ranks to import modules before their next call."""

    @abstractmethod
    def run(self, function: Callable[..., Any], args_by_rank: Mapping[int, Sequence[Any]], answered: Answered) -> None:
        """Start a call in the workers of these ranks, and return without waiting."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the workers, and free their CPUs and GPUs."""

    def clean_up(self) -> None:  # noqa: B027
        """Remove the temporary working folders of workers that have ended, if they do not use the job's own folder."""
