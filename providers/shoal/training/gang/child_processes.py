"""Run the workers of a gang as processes that the driver starts on its own machine, without Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shoal.errors import CapacityError, WorkerLostError
from shoal.training.capacity import Node, listed, workers_on
from shoal.training.context import say
from shoal.training.gang.backend import Answered
from shoal.training.gang.placement import GangShape, Seat
from shoal.training.gang.worker import Failure, Joined, Lost, Place, Success

_LOOPBACK = "127.0.0.1"


class ChildProcesses:
    """Workers that are child processes of this process, and end when this process ends, even if it is killed.

    Args:
        shape: Number and size of the workers.
        node: Name and CPUs of this machine.

    Raises:
        CapacityError: The workers do not fit on this machine.
    """

    host = lifeline_host = _LOOPBACK

    def __init__(self, shape: GangShape, node: Node) -> None:
        # The pool's queue starts a job only if the CPUs of its workers are free, so this code does not wait for free
        # CPUs.
        room = workers_on(node, int(shape.cpus_per_worker), shape.gpus_per_worker)
        if shape.num_workers > room:
            raise CapacityError(
                f"{shape} do not fit on this machine, which has room for {room} of them ({listed([node])}): request "
                "fewer or smaller workers"
            )
        self._shape = shape
        self._children: list[_Child] = []
        self.seats: Sequence[Seat] = [Seat(0, node["name"], node["name"], shape.num_workers)] * shape.num_workers

    def join(self, places: Sequence[Place], env: Mapping[str, str], timeout: float) -> Iterator[Joined]:
        """Start the processes, make them connect to the driver, and yield their answers by rank."""
        deadline = time.monotonic() + timeout
        joins = []
        for place in places:
            child = _started(int(self._shape.cpus_per_worker), self._shape.trim_memory)
            self._children.append(child)
            joins.append(child.call("join", place, env))
        for rank, (seat, join) in enumerate(zip(self.seats, joins, strict=True)):
            who = f"rank {rank} (node {seat.node})"
            try:
                answer = join.result(timeout=max(0.1, deadline - time.monotonic()))
            except FutureTimeoutError:
                raise WorkerLostError(f"{who} did not start within {timeout:.0f} s") from None
            if not isinstance(answer, Joined):
                why = answer.summary if isinstance(answer, Failure) else answer.reason
                raise WorkerLostError(f"{who} was lost while it started: {why}")
            yield answer

    def preload(self, modules: Sequence[str]) -> None:
        """Tell the workers to import modules before their next call."""
        for child in self._children:
            child.call("preload", list(modules))

    def run(self, function: Callable[..., Any], args_per_rank: Sequence[Sequence[Any]], answered: Answered) -> None:
        """Start a call in every worker, and return without waiting."""
        for rank, (child, args) in enumerate(zip(self._children, args_per_rank, strict=True)):
            child.call("run", function, args).add_done_callback(partial(_pass_on, answered, rank))

    def kill(self) -> None:
        """Kill the processes, and wait until they have ended."""
        for child in self._children:
            child.kill()

    def clean_up(self) -> None:
        """Do nothing, because the workers use the job's own working folder."""


_ahead: dict[tuple[int, bool], list[_Child]] = {}


def start_ahead(shape: GangShape, modules: Sequence[str]) -> None:
    """Start the worker processes before their gang is created, so that workers and driver import modules at the same
    time.

    Args:
        shape: Number and size of the workers.
        modules: Modules that the workers need.
    """
    key = int(shape.cpus_per_worker), shape.trim_memory
    for _ in range(shape.num_workers):
        child = _Child(*key)
        child.call("preload", list(modules))
        _ahead.setdefault(key, []).append(child)


def _started(cpus: int, trim_memory: bool) -> _Child:
    """Return a process of this size that :func:`start_ahead` has started, or else a new process."""
    ahead = _ahead.get((cpus, trim_memory))
    return ahead.pop() if ahead else _Child(cpus, trim_memory)


def _pass_on(answered: Answered, rank: int, future: Future[Success | Failure | Lost]) -> None:
    answered(rank, future.result())


class _Child:
    """One child process, which answers calls of the methods of `Worker` one after the other.

    Args:
        cpus: Number of CPUs of the worker.
        trim_memory: Whether the process returns freed memory to the operating system.
    """

    def __init__(self, cpus: int, trim_memory: bool) -> None:
        source_root = str(Path(__file__).parents[3])
        inherited = os.environ.get("PYTHONPATH")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # With -P Python does not import from the working directory, where a folder may have the name of a
                # library and would be imported instead of the library.
                [sys.executable, "-P", "-m", "shoal.training.gang.child", str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (source_root, inherited))),
                    "PYTHONUNBUFFERED": "1",
                    # Some libraries, such as Arrow, choose the size of their thread pools by this variable. Ray sets
                    # this variable, too.
                    "OMP_NUM_THREADS": str(max(1, cpus)),
                },
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._calls: deque[Future[Any]] = deque()
        self._lost: Lost | None = None
        threading.Thread(target=self._print, name="shoal-worker-output", daemon=True).start()
        threading.Thread(target=self._receive, name="shoal-worker-answers", daemon=True).start()
        if trim_memory:
            self.call("trim_memory")

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the process's `Worker`.

        Returns:
            A future of the answer: the method's return value, a `Failure` if it raised, or `Lost` if the process ended.
        """
        import cloudpickle

        answer: Future[Any] = Future()
        content = cloudpickle.dumps((method, args))
        with self._lock:
            if self._lost is None:
                self._calls.append(answer)
                # If sending fails, the process has ended, and `_receive` answers the call.
                with contextlib.suppress(OSError):
                    self._connection.send_bytes(content)
                return answer
        answer.set_result(self._lost)
        return answer

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def _receive(self) -> None:
        """Pass on the answers of the process until the process ends, and then answer all open calls with `Lost`."""
        import cloudpickle

        with self._connection, contextlib.suppress(EOFError, OSError):
            while True:
                content = self._connection.recv_bytes()
                self._calls.popleft().set_result(cloudpickle.loads(content))
        with self._lock:
            self._lost = Lost(f"its process ended with exit code {self._process.wait()}")
        for answer in self._calls:
            answer.set_result(self._lost)

    def _print(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                say(f"(worker pid={self._process.pid}) {line.decode(errors='backslashreplace').rstrip()}")
