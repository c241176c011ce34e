"""Run the workers of a gang as processes that the driver starts on its own machine, the nodes of a local pool.

Ray reserves the CPUs of the workers and chooses their nodes, so that neither Ray's tasks nor other trainings use these
CPUs, but does not start the workers: the driver forks them from a template, which has imported the library. On a pool
without Ray, the driver reserves the CPUs in the pool's register."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, NamedTuple

from shoal.errors import ShoalError, WorkerLostError
from shoal.lazy_imports import cloudpickle
from shoal.node_register import NodeRegister
from shoal.os_processes import how_ended, start_python
from shoal.training import cluster
from shoal.training.gang import placement
from shoal.training.gang.child import serve_worker
from shoal.training.gang.local_node import LocalNode, NodeWithoutRay
from shoal.training.gang.placement import GangShape, Seat, reserve_in_register
from shoal.training.gang.worker import Answered, Failure, Joined, Lost, Place, Success, Workers
from shoal.training.host.imports import short_spins
from shoal.training.host.output_lines import LOOK_EVERY_S, OutputLines
from shoal.training.host.process_channel import ProcessChannel
from shoal.training.reporting import say

_LOOPBACK = "127.0.0.1"


class ChildProcesses(Workers):
    """Workers that are child processes of this process, and end when this process ends, even if it is killed.

    Args:
        nodes: The nodes of the seats, by name.
        release: Function that frees the CPUs of the workers.
    """

    host = listen_host = _LOOPBACK

    def __init__(
        self, shape: GangShape, seats: Sequence[Seat], nodes: Mapping[str, LocalNode], release: Callable[[], None]
    ) -> None:
        self.seats = seats
        self._shape = shape
        self._nodes = nodes
        self._release = release
        self._children: dict[int, _Child] = {}

    def _begin(self, place: Place, env: Mapping[str, str]) -> Future[Any]:
        try:
            self._children[place.rank] = child = _Child(_StartSettings.of(self._shape))
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread is left
            raise WorkerLostError(
                f"rank {place.rank} could not be started, because this machine cannot start another process: {error}. "
                "Check its limits of processes and memory (`ulimit -u`, pids and memory of its container)"
            ) from error
        if self._shape.trim_memory:
            child.call("trim_memory")
        return child.call("join_as_child", place, env, self._nodes[self.seats[place.rank].node])

    def _joined(self, rank: int, join: Future[Any], left: float, timeout: float) -> Joined:
        who = f"rank {rank} (node {self.seats[rank].node})"
        try:
            answer = join.result(timeout=max(0.1, left))
        except FutureTimeoutError:
            raise WorkerLostError(f"{who} did not start within {timeout:.0f} s") from None
        if not isinstance(answer, Joined):
            why = answer.summary if isinstance(answer, Failure) else answer.reason
            raise WorkerLostError(f"{who} was lost while it started: {why}")
        return answer

    def _end(self, rank: int) -> None:
        self._children[rank].kill()

    def preload(self, modules: Sequence[str], complete: bool, ranks: Iterable[int]) -> None:
        """Tell the workers of these ranks to import modules before their next call."""
        for rank in ranks:
            self._children[rank].call("preload", list(modules), complete)

    def run(self, function: Callable[..., Any], args_by_rank: Mapping[int, Sequence[Any]], answered: Answered) -> None:
        """Start a call in the workers of these ranks, and return without waiting."""
        for rank, args in args_by_rank.items():
            self._children[rank].call("run", function, args).add_done_callback(partial(_pass_on, answered, rank))

    def kill(self) -> None:
        """Kill the processes, wait until they have ended, and free their CPUs."""
        for child in self._children.values():
            child.kill()
        self._release()


_template: _Template | None = None
_template_lock = threading.Lock()


def use_template(control: socket.socket | None) -> None:
    """Fork the workers of this process from a template (see `shoal.training.gang.child`)."""
    global _template
    with _template_lock:
        if _template is not None:
            _template.close()
        _template = None if control is None else _Template(control)


def has_template() -> bool:
    """Return whether the workers of this process are forked from a template, as long as the template runs."""
    return _template is not None


def forked(run: Callable[..., object], args: Sequence[object], descriptors: Sequence[int]) -> Forked | None:
    """Fork a process that calls a function with file descriptors and arguments from the template.

    Returns:
        The process; None if there is no template, or it cannot fork.
    """
    with _template_lock:
        return _template.fork(run, args, descriptors) if _template else None


def import_ahead(resolve: Callable[[], GangShape], modules: Sequence[str], *, complete: bool = False) -> None:
    """Let the template import modules before the gang is created, while this process does other things. If Ray starts
    the workers, do nothing.

    Args:
        resolve: Function that returns the number and size of the workers. If it raises an error, nothing is imported,
            and the start of the gang raises the same error.
        modules: Names of the modules.
        complete: Whether the workers run user code, which may need the modules' optional packages.
    """
    if not has_template():
        return
    with contextlib.suppress(ShoalError), warnings.catch_warnings(action="ignore"):
        settings = _StartSettings.of(resolve())
        with _template_lock:
            if _template is not None:
                _template.prepare(settings, modules, complete)


class _StartSettings(NamedTuple):
    """Settings of a worker process that must be set before the process imports libraries."""

    cpus: int
    trim_memory: bool

    @classmethod
    def of(cls, shape: GangShape) -> _StartSettings:
        return cls(int(shape.cpus_per_worker), shape.trim_memory)


def _pass_on(answered: Answered, rank: int, future: Future[Success | Failure | Lost]) -> None:
    answered(rank, future.result())


class _Proxy:
    """Proxy of an object in another process. The other process executes the method calls one after the other.

    Args:
        channel: Channel to the other process.
        why_lost: Function that returns why the other process has ended. It is called after the socket was shut down.
    """

    def __init__(self, channel: ProcessChannel, why_lost: Callable[[], Lost]) -> None:
        self._channel = channel
        self._why_lost = why_lost
        self._lock = threading.Lock()
        self._calls: deque[Future[Any]] = deque()
        self._lost: Lost | None = None
        threading.Thread(target=self._receive, name="shoal-worker-answers", daemon=True).start()

    def call(self, method: str, *args: Any, descriptors: Sequence[int] = ()) -> Future[Any]:
        """Send a method call to the other process, and return without waiting for the answer."""
        answer: Future[Any] = Future()
        content = cloudpickle.dumps((method, args))
        with self._lock:
            if self._lost is None:
                self._calls.append(answer)
                # If sending fails, the other process has ended, and `_receive` sets the result of the call to `Lost`.
                with contextlib.suppress(OSError):
                    self._channel.send(content)
                    if descriptors:
                        socket.send_fds(self._channel.socket, [b"+"], descriptors)
                return answer
        answer.set_result(self._lost)
        return answer

    def close(self) -> None:
        """Close the socket to the other process, which then ends itself."""
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        """Store each answer as the result of its call. When the other process has ended, set the results of all
        unanswered calls to `Lost`."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                content = self._channel.receive()
                try:
                    answer = cloudpickle.loads(content)
                except BaseException as error:  # a user's class may raise anything when it is unpickled
                    what = f"the answer of the worker cannot be unpickled here: {type(error).__name__}: {error}"
                    answer = Failure(what, traceback.format_exc(), None)
                self._calls.popleft().set_result(answer)
        self.close()
        with self._lock:
            self._lost = self._why_lost()
            self._channel.close()
        for answer in self._calls:
            answer.set_result(self._lost)


class _Template:
    """Handle of a template, a process that forks itself for each worker."""

    def __init__(self, control: socket.socket) -> None:
        self._proxy = _Proxy(ProcessChannel(control), lambda: Lost("the template of the workers has ended"))
        self.close = self._proxy.close
        self.settings: _StartSettings | None = None
        """Settings with which workers can be forked."""

    def prepare(self, settings: _StartSettings, modules: Sequence[str], complete: bool) -> None:
        if self.settings is None:
            self.settings = settings
            self._proxy.call("prepare", *settings, sys.path, list(modules), complete)

    def fork(self, run: Callable[..., object], args: Sequence[object], descriptors: Sequence[int]) -> Forked | None:
        """Wait until the template has imported its modules, and fork a process that calls a function.

        Returns:
            The process; None if the template cannot fork, or has ended.
        """
        if self.settings is None:
            return None
        pid = self._proxy.call("fork", run, args, len(descriptors), descriptors=descriptors).result()
        return Forked(pid, self._proxy) if isinstance(pid, int) else None


class Forked:
    """Process that a template has forked.

    Args:
        pid: Process id. Only :meth:`wait` lets the template reap the process, so that the id stays valid until then.
        template: Proxy of the template.
    """

    def __init__(self, pid: int, template: _Proxy) -> None:
        self.pid = pid
        self._template = template
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self._code: int | None = None

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        # `exit_code` is called only after the process has ended. Otherwise the template would wait for the process, and
        # would fork no other worker during this time.
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll()
        with self._lock:
            if self._code is None:
                code = self._template.call("exit_code", self.pid).result()
                # If the template has ended as well, the exit code is unknown. Most likely both processes were killed.
                self._code = code if isinstance(code, int) else -signal.SIGKILL
            return self._code


class _Child:
    """One child process, which contains a `Worker` and executes calls of its methods."""

    def __init__(self, settings: _StartSettings) -> None:
        ours, theirs = socket.socketpair()
        output, print_to = os.pipe()
        try:
            self._process = _start(settings, theirs, print_to)
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            theirs.close()
            os.close(print_to)
        channel = ProcessChannel(ours, self._process.pid)
        self._proxy = _Proxy(channel, self._why_lost)
        self.call = self._proxy.call
        threading.Thread(target=self._print, args=(output,), name="shoal-worker-output", daemon=True).start()

    def _why_lost(self) -> Lost:
        code = self._process.wait()
        return Lost(f"its process {how_ended(code)}", exit_code=code)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()
        self._process.wait()

    def _print(self, output: int) -> None:
        def show(new: list[str]) -> None:
            say("\n".join(f"(worker pid={self._process.pid}) {line}" for line in new))

        lines, poll = OutputLines(show), select.poll()
        poll.register(output)
        with os.fdopen(output, "rb", buffering=0) as pipe:
            while True:
                if poll.poll(LOOK_EVERY_S * 1000):
                    if not (chunk := pipe.read(2**16)):
                        break
                    lines.write(chunk)
                lines.look()
        lines.end()


def _start(settings: _StartSettings, calls: socket.socket, output: int) -> subprocess.Popen[bytes] | Forked:
    """Start the process of a worker: fork it from the template if the template has the same settings; otherwise start a
    new Python process."""
    with _template_lock:
        descriptors = [calls.fileno(), output]
        if _template and _template.settings == settings and (forked := _template.fork(serve_worker, (), descriptors)):
            return forked
    return start_python(
        ["-m", "shoal.training.gang.child", str(calls.fileno()), *sys.path],
        pass_fds=[calls.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        environment={
            **short_spins(),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            # Some libraries, such as Arrow, choose the size of their thread pools by this variable. Ray sets this
            # variable, too.
            "OMP_NUM_THREADS": str(max(1, settings.cpus)),
        },
    )


FindNodes = Callable[[], Mapping[str, LocalNode]]
"""Type of a function that finds the running nodes of the pool, by name."""

_find_nodes: FindNodes | None = None


def use_nodes(find: FindNodes) -> None:
    """Make this process start its workers itself on the nodes that `find` returns."""
    global _find_nodes
    _find_nodes = find


def finder(shape: GangShape) -> FindNodes | None:
    """Return the function that finds the nodes on which this process starts the workers of a gang itself; None if Ray
    starts the workers.

    Workers with GPUs are started by Ray, because Ray chooses their GPUs when it starts them.
    """
    return _find_nodes if has_template() and not shape.gpus_per_worker else None


def on_one_host(shape: GangShape) -> bool:
    """Return whether a process can use the CPUs of all workers of a gang, on this pool at any time: this process starts
    the workers itself."""
    return cluster.register() is not None or finder(shape) is not None


def on_nodes_with_ray(shape: GangShape, deadline: float, find: FindNodes) -> ChildProcesses:
    """Create the workers of a gang on nodes on which Ray reserves their CPUs.

    Raises:
        CapacityError: The active nodes are too small for the gang, or had no free room in time.
        WorkerLostError: A node has ended.
    """
    group = placement.reserve(shape, deadline)
    try:
        seats, nodes = placement.seats(shape, group), find()
        for rank, seat in enumerate(seats):
            if seat.node not in nodes:
                raise WorkerLostError(f"rank {rank} could not be started, because node {seat.node} was lost")
        return ChildProcesses(shape, seats, nodes, partial(placement.release, group))
    except BaseException:
        placement.release(group)
        raise


def on_nodes_without_ray(shape: GangShape, deadline: float, register: NodeRegister) -> ChildProcesses:
    """Create the workers of a gang on nodes of a pool without Ray, as `on_nodes_with_ray` does."""
    reservation = reserve_in_register(shape, register, deadline)
    nodes = {node.name: NodeWithoutRay(register.folder, node) for node in reservation.nodes}
    return ChildProcesses(shape, reservation.seats, nodes, reservation.release)
