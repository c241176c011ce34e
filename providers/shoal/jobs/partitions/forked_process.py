"""Fork processes from a worker: one that calls the user's function for partitions, and others that do one thing."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from shoal.errors import TrainingError
from shoal.jobs.partitions import partition_process
from shoal.jobs.partitions.messages import Begun, Bucket, BucketEnded, Ended, Message, Work
from shoal.os_processes import how_ended
from shoal.training.host import memory
from shoal.training.host.process_channel import ProcessChannel
from shoal.training.reporting import GangContext, gang_context, set_gang_context

_PR_SET_PDEATHSIG = 1

LOG_BYTES = 8192
"""Bytes of the end of a partition's output that are kept."""

_MOST_CHUNKS = 16
"""Chunks of output that are read at once: more than the pipe holds, which has all marks, and not without an end if a
program that the function has started prints without an end."""

_LOOK_EVERY_S = 0.25
_SHORT_MEMORY = 0.08
"""Part of the machine's memory of which less is short: more than the part at which the node would end the worker."""


def forked(run: Callable[[], object]) -> int:
    """Fork a process that calls a function and ends with this worker, and return its process id."""
    worker = os.getpid()
    # Otherwise each garbage collection of the process would copy the memory that it shares with this worker.
    gc.freeze()
    with warnings.catch_warnings():
        # The other thread of a worker sends heartbeats, and takes no lock that the fork needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _become(run, worker)
    return pid


def _become(run: Callable[[], object], worker: int) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == worker:  # else the worker has ended before the call
            with contextlib.suppress(OSError):  # a container may refuse this
                Path("/proc/self/oom_score_adj").write_text("1000")
            # The process is no member of a gang: `get_shard` has to return all rows, and metrics have no rank.
            set_gang_context(GangContext())
            run()
    finally:
        os._exit(1)


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a forked process, whose memory and threads end with it, and return its value.

    Raises:
        TrainingError: The process has ended before the function returned.
        Exception: The exception that the function raised.
    """
    ours, theirs = socket.socketpair()

    def run() -> None:
        try:
            answer = True, function(*args)
        except Exception as error:
            answer = False, error
        ProcessChannel(theirs).send(cloudpickle.dumps(answer))

    pid = forked(run)
    theirs.close()
    with ProcessChannel(ours, pid) as channel:
        try:
            is_value, found = cloudpickle.loads(channel.receive())
        except EOFError:
            is_value, found = False, None
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if is_value:
        return found
    raise found or TrainingError(f"a process of the worker, which divides rows into buckets, {how_ended(code)}")


class ProcessLostError(Exception):
    """The process that called the function has ended, or was ended because it took too long.

    Args:
        cause: Reason, as a phrase.
        again: Whether the partition may be tried again.
    """

    def __init__(self, cause: str, *, again: bool = True) -> None:
        super().__init__(cause)
        self.again = again


class ForkedProcess:
    """A process that calls the function, forked from this worker.

    Args:
        work: What is the same for all partitions.
    """

    def __init__(self, work: Work) -> None:
        ours, theirs = socket.socketpair()
        self._output, output = os.pipe()
        self._oom_kills = memory.OomKills()

        def run() -> None:
            ours.close()
            os.close(self._output)
            partition_process.serve(work, ProcessChannel(theirs), output)

        self._pid = forked(run)
        self._channel = ProcessChannel(ours, self._pid)
        theirs.close()
        os.close(output)
        os.set_blocking(self._output, False)
        self._parts = [b""]
        self._log: bytes | None = None
        self._idle_bytes: int | None = None
        self.peak_bytes = 0

    def messages(
        self, bucket: Bucket, timeout: float | None, meanwhile: Callable[[], object] = lambda: None
    ) -> Iterator[Message]:
        """Have a bucket processed, and yield the messages of the process. Call `meanwhile` while no message comes.

        Raises:
            ProcessLostError: The process has ended, or a call of the function took longer than `timeout`.
        """
        with contextlib.suppress(OSError):  # the process has ended, which `_receive` finds
            self._channel.send(pickle.dumps(bucket))
        deadline: float | None = None
        while True:
            message = self._receive(deadline, timeout, meanwhile)
            if isinstance(message, BucketEnded):
                return
            if isinstance(message, Begun):
                self._next_part()
                self._log = None
                deadline = None if timeout is None else time.monotonic() + timeout
            elif isinstance(message, Ended):
                self._log = self._next_part()
                deadline = None
            yield message

    def log(self) -> str:
        """Return the end of the output of the function's last call."""
        self._read_output()
        output = self._parts[0] if self._log is None else self._log
        return output[-LOG_BYTES:].decode(errors="backslashreplace")

    def _next_part(self) -> bytes:
        """Remove the output before the next mark, and return it. The process writes a mark before it sends a message,
        so the mark is there."""
        self._read_output()
        return self._parts.pop(0)

    def growth(self) -> int:
        """Return by how many bytes the memory of the process has grown since its first bucket."""
        now = _resident_bytes(self._pid)
        if self._idle_bytes is None:
            self._idle_bytes = now
        return now - self._idle_bytes

    def end(self) -> None:
        """Kill the process, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._wait()
        self._channel.close()
        os.close(self._output)

    _code: int | None = None

    def _wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def _receive(self, deadline: float | None, timeout: float | None, meanwhile: Callable[[], object]) -> Message:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._channel.descriptors(), self._output):
                selector.register(descriptor, selectors.EVENT_READ)
            look_at = time.monotonic() + _LOOK_EVERY_S
            while True:
                ready = {key.fd for key, _ in selector.select(_LOOK_EVERY_S)}
                if self._output in ready and not self._read_output():
                    selector.unregister(self._output)
                if not ready.isdisjoint(self._channel.descriptors()):
                    try:
                        content = self._channel.receive_at_once()
                    except (EOFError, OSError):
                        raise ProcessLostError(self._how_ended()) from None
                    if content is not None:
                        message: Message = pickle.loads(content)
                        return message
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_EVERY_S
                    self._look(deadline, timeout)
                    meanwhile()

    def _look(self, deadline: float | None, timeout: float | None) -> None:
        """End the process if it takes too long, or uses more than its share of the memory while memory is short."""
        resident = _resident_bytes(self._pid)
        self.peak_bytes = max(self.peak_bytes, resident)
        if deadline is not None and time.monotonic() > deadline:
            raise ProcessLostError(f"took longer than {timeout:g} s", again=False)
        total = memory.total_bytes()
        if resident > total // gang_context().local_world_size and memory.available_bytes() < _SHORT_MEMORY * total:
            raise ProcessLostError(
                f"was ended, because it used {resident / 2**20:,.0f} MiB and its machine has almost no memory left,"
            )

    def _read_output(self) -> bool:
        """Read what the process has printed, divided at the marks; return whether it may print more."""
        for _ in range(_MOST_CHUNKS):
            try:
                chunk = os.read(self._output, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            divided = (self._parts.pop() + chunk).split(partition_process.MARK)
            # A mark may be divided between two chunks.
            self._parts += [part[-LOG_BYTES - len(partition_process.MARK) :] for part in divided]
        return True

    def _how_ended(self) -> str:
        code = self._wait()
        killed = self._oom_kills.told() if code == -signal.SIGKILL else ""
        return how_ended(code) + (f" ({killed})" if killed else "")


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process that it does not share with its parent; 0 if it has ended."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
