"""The actor that a gang's workers are: it runs one function after the other, and says how each ended."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.gang_position import set_current_shard
from shoal.errors import DataError, InvalidArgumentError, TrainingError
from shoal.training.context import TrainingContext, set_context
from shoal.training.gang.lifeline import Lifeline
from shoal.training.host import memory
from shoal.training.host.imports import import_lean


class PeerError(TrainingError):
    """This worker failed only because another did; whoever raises it knows that its own part was sound."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Which process a worker is.

    Args:
        rank: Rank in the gang.
        node: Name of its node.
        pid: Its process id there.
    """

    rank: int
    node: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker belongs.

    Args:
        rank: Its rank.
        world_size: Number of workers.
        local_world_size: Number of workers on its node.
        host: Address of the driver's switchboard.
        port: Its port.
        token: Its token.
    """

    rank: int
    world_size: int
    local_world_size: int
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True)
class Success:
    """What a call returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What a call raised, in a form that needs none of the worker's modules to be read.

    Args:
        summary: Type and message.
        traceback: The traceback as text.
        error: The exception itself, if it is one of shoal's own about the data, the training or its arguments.
    """

    summary: str
    traceback: str
    error: DataError | TrainingError | InvalidArgumentError | None


class Worker:
    """One worker of a gang: nobody until it joins, because a call that has arguments loads NumPy and Arrow."""

    def __init__(self) -> None:
        self._lifeline: Lifeline | None = None

    def spare(self) -> None:
        """Has this process give back what it frees; its first call."""
        memory.spare()

    def join(self, place: Place, env: Mapping[str, str]) -> int:
        """Connects to the driver's switchboard.

        Args:
            place: Where it stands in the gang, and where the switchboard is.
            env: Environment variables to set; a call's arguments pass from process to process and are stored nowhere.

        Returns:
            The process id.
        """
        os.environ.update(env)
        self._lifeline = line = Lifeline(place.host, place.port, place.token, place.rank)
        set_current_shard(place.rank, place.world_size)
        set_context(TrainingContext(place.rank, place.world_size, place.local_world_size, line.log, line.note))
        return os.getpid()

    def preload(self, modules: Sequence[str]) -> None:
        """Imports modules, leanly, while the driver does something else."""
        import_lean(modules)

    def run(self, function: Callable[..., Any], args: Sequence[Any]) -> Success | Failure:
        """Calls a function.

        Args:
            function: What to call.
            args: Its arguments.

        Returns:
            What came of it; an exception too is a value, so that Ray's own errors mean that this process died.
        """
        assert self._lifeline is not None
        try:
            return Success(function(*args))
        except Exception as exc:
            error = exc if isinstance(exc, DataError | TrainingError | InvalidArgumentError) else None
            summary = "".join(traceback.format_exception_only(exc)).strip()
            return Failure(summary, traceback.format_exc(), error)
        finally:
            self._lifeline.done()
