"""Connect each worker to its driver by a socket: `WorkerConnections` is the driver's end, `DriverConnection` the other.

A worker counts as lost when its heartbeats stop or its socket closes, and a worker ends when its driver is dead.

Ray reports a dead actor quickly only if the actor's process ended. Ray detects a vanished node after five missed
health checks, which take about 15 s. A socket is faster: the kernel closes the socket of a killed process, and TCP
keepalive closes the socket of a host that no longer answers. The workers also send their log lines through this socket,
because an actor call for each round would take far more time and would need another actor.

A worker sends frames, each of which is one line of text. The first frame of a socket is the hello: the gang's token and
the worker's rank. Each later frame begins with a letter: ``h`` (heartbeat), ``d`` (a call is done), ``l`` with a log
line as JSON, ``n`` with a note for the driver as JSON, ``q`` with a question to the driver as JSON, or ``x`` with the
reason why the worker ends itself. The driver sends only the answers to questions, each as one line of JSON.

Any process on the host can connect. Therefore the hello must be short and must arrive within seconds, its token is
compared in constant time, and no other data is parsed before the hello is accepted."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, NoReturn

from shoal.errors import TrainingError
from shoal.own_pauses import waited_since
from shoal.secrets.redaction import hide_known
from shoal.training.gang.local_node import NodeWatch, name_of
from shoal.training.timeouts import WORKER_HEARTBEAT_S, WORKER_SILENCE_S

NODE_LOST = "so the node is lost"
"""End of the reason for which a worker ends itself if its node has ended."""

# TCP settings with which the kernel detects a vanished host: it sends the first probe after 1 s without data, then one
# every second, and closes the connection after three unanswered probes.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_UNANSWERED_MS = 4000
"""Milliseconds without an acknowledgement of sent data after which the other host counts as vanished."""
_UNANSWERED_PROBES = 4
"""Number of unanswered probes, of a host that could take no more data, after which it counts as vanished."""
# Maximum size of a frame (one line of text from a worker). The longest frames are log lines and notes with a few
# metrics, so a longer frame is an error and ends the connection.
MAX_FRAME_BYTES = 2**20
# Maximum size of a hello, the first frame of a connection. A hello contains only a token of 32 characters and a rank.
_MAX_HELLO_BYTES = 256
# Seconds after which a connection is closed if it has not sent a hello (its first message). A worker sends the hello
# directly after connecting, but on a busy machine the worker may have to wait for CPU time.
_HELLO_SECONDS = 10.0
# This number plus the number of workers is the maximum number of open connections that have not identified themselves.
# If there are more, the oldest of these connections is closed, so that other processes on the host cannot use up all
# file descriptors.
_SPARE_CONNECTIONS = 64


class EventKind(Enum):
    """Kinds of events that `WorkerConnections` (the driver's end of the workers' sockets) reports about a worker."""

    GONE = "gone"
    """The worker's process or host is gone, or does not respond; the text contains the reason."""
    LEFT = "left"
    """The worker ends its own process; the text contains the reason."""
    LINE = "line"
    """The worker logged one or more lines."""
    NOTE = "note"
    """The worker sent a note to the driver; the text is JSON."""
    QUESTION = "question"
    """The worker asked the driver a question, and waits for `WorkerConnections.answer`; the text is JSON."""
    DONE = "done"
    """The worker finished a call; all its log lines of this call were reported before."""


_KINDS = {b"n": EventKind.NOTE, b"q": EventKind.QUESTION, b"d": EventKind.DONE}
"""Kinds of the frames whose content the driver gets as it is, by their first byte."""

Listener = Callable[[int, EventKind, str], None]


@dataclass
class _Connection:
    """An accepted connection; `rank` is None until the connected process has identified itself as a worker."""

    sock: socket.socket
    opened: float
    heard: float
    rank: int | None = None
    reported: bool = False
    buffer: bytearray = field(default_factory=bytearray)


class WorkerConnections:
    """Driver's end of the sockets of all workers of a gang; calls a function for each event of a worker.

    Args:
        host: Address to listen on; the workers must be able to reach this address.
        listener: Function to call for each event, in the own thread of this object, with rank, kind and text.
    """

    def __init__(self, host: str, size: int, listener: Listener) -> None:
        self.token = secrets.token_hex(16)
        self._size = size
        self._listener = listener
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.host = host
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._connections: dict[socket.socket, _Connection] = {}
        self._joined: set[int] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="shoal-worker-connections", daemon=True)
        self._thread.start()

    def connected(self) -> set[int]:
        """Return the ranks of the workers whose sockets to the driver are open."""
        with self._changed:
            return {connection.rank for connection in self._connections.values() if connection.rank is not None}

    def wait_joined(self, number: int, timeout: float) -> bool:
        """Wait until `number` workers have connected. A worker that has connected and then ended counts, too."""
        began = time.monotonic()
        with self._changed:
            while len(self._joined) < number and (left := timeout - waited_since(began)) > 0:
                self._changed.wait(left)
            return len(self._joined) >= number

    def wait_replaceable(self, rank: int, timeout: float) -> bool:
        """Wait until the socket of a worker is closed, and let another worker join in its place."""
        with self._changed:
            self._joined.discard(rank)
            return self._changed.wait_for(lambda: rank not in self.connected(), timeout)

    def wait_all_gone(self, timeout: float) -> bool:
        """Wait until the process of every connected worker has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.connected(), timeout)

    def hang_up(self) -> None:
        """Make the remaining workers end themselves, by closing one direction (driver to worker) of each socket.

        The other direction stays open, so that `wait_all_gone` notices when a worker's process has ended.
        """
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_WR)

    def answer(self, rank: int, answer: Any) -> None:
        """Send a worker the answer to its question, as JSON in one line. A worker that is gone gets none."""
        with self._changed:
            sock = next((each.sock for each in self._connections.values() if each.rank == rank), None)
        if sock is None:
            return
        rest = memoryview(f"{json.dumps(answer)}\n".encode())
        # The loss of the worker, or the end of the gang, closes the socket, and is reported elsewhere.
        with contextlib.suppress(OSError, ValueError):
            while rest:
                try:
                    rest = rest[sock.send(rest) :]
                except BlockingIOError:
                    writable = select.poll()
                    writable.register(sock, select.POLLOUT)
                    writable.poll(WORKER_HEARTBEAT_S * 1000)

    def close(self) -> None:
        """Close the sockets of all workers and stop listening for further connections."""
        self._closing = True
        # This byte wakes up the thread, which then sees `_closing` and ends. If the thread has already ended, the
        # socket is closed, so sending fails and the error is ignored.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(timeout=WORKER_HEARTBEAT_S):
                    if key.fileobj is self._server:
                        self._accept()
                    # The selector may report a connection that _accept() has just closed, because there were too many
                    # connections. Such a connection is no longer in _connections and is skipped.
                    elif connection := self._connections.get(key.fileobj):  # type: ignore[call-overload]
                        self._read(connection)
                self._check_silence()
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            for sock in (self._server, self._wake_out, self._wake_in):
                sock.close()
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            sock.setblocking(False)
            detect_vanished_host(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
            self._selector.register(sock, selectors.EVENT_READ)
            now = time.monotonic()
            with self._changed:
                self._connections[sock] = _Connection(sock, opened=now, heard=now)
        strangers = [connection for connection in self._connections.values() if connection.rank is None]
        if len(strangers) > self._size + _SPARE_CONNECTIONS:
            self._drop(strangers[0])

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as exc:
            self._lost(connection, f"its host no longer answers ({exc.strerror})")
            return
        if not data:
            self._lost(connection, "its process was killed or crashed (its exit code is not known)")
            return
        connection.heard = time.monotonic()
        connection.buffer += data
        *frames, rest = connection.buffer.split(b"\n")
        connection.buffer = rest
        if frames and connection.rank is None and not self._admit(connection, bytes(frames.pop(0))):
            self._drop(connection)
            return
        try:
            if connection.rank is not None:
                # Lines are printed together, because printing one line takes longer than a worker needs to write it.
                for is_log, group in groupby(frames, lambda frame: frame[:1] == b"l"):
                    if is_log:
                        lines = "\n".join(str(json.loads(frame[1:])) for frame in group)
                        self._listener(connection.rank, EventKind.LINE, lines)
                    else:
                        for frame in group:
                            self._handle(connection, connection.rank, bytes(frame))
        except Exception as exc:
            # A malformed frame from one worker must not end the thread that serves all other workers.
            self._lost(connection, f"it sent a frame that the driver cannot read ({type(exc).__name__}: {exc})")
            return
        if connection.rank is None and len(rest) > _MAX_HELLO_BYTES:
            self._drop(connection)
        elif len(rest) > MAX_FRAME_BYTES:
            self._lost(connection, f"it sent a frame of more than {MAX_FRAME_BYTES} bytes")

    def _admit(self, connection: _Connection, hello: bytes) -> bool:
        """Check the first message (hello) of a connection, and record the rank that the message contains."""
        token, _, rank = hello.partition(b" ")
        if len(hello) > _MAX_HELLO_BYTES or not hmac.compare_digest(token, self.token.encode()):
            return False
        if not rank.isdigit() or int(rank) >= self._size:
            return False
        with self._changed:
            connection.rank = int(rank)
            self._joined.add(connection.rank)
            self._changed.notify_all()
        return True

    def _handle(self, connection: _Connection, rank: int, frame: bytes) -> None:
        """Decode a frame (one line of text from a worker), and pass the content to the function `listener`."""
        if frame[:1] == b"x":
            self._report(connection, str(json.loads(frame[1:])), EventKind.LEFT)
        elif (kind := _KINDS.get(frame[:1])) is not None:
            self._listener(rank, kind, frame[1:].decode())

    def _check_silence(self) -> None:
        for connection in list(self._connections.values()):
            if connection.rank is None:
                if waited_since(connection.opened) > _HELLO_SECONDS:
                    self._drop(connection)
            elif waited_since(connection.heard) > WORKER_SILENCE_S:
                # The worker is reported as lost, but its socket stays open, so that `wait_all_gone` can detect the end
                # of the worker process.
                self._report(
                    connection,
                    f"its process sent nothing for {WORKER_SILENCE_S:.0f} s: it was stopped, or got no CPU time",
                )

    def _lost(self, connection: _Connection, why: str) -> None:
        self._drop(connection)
        self._report(connection, why)

    def _report(self, connection: _Connection, why: str, kind: EventKind = EventKind.GONE) -> None:
        if connection.rank is not None and not connection.reported:
            connection.reported = True
            self._listener(connection.rank, kind, why)

    def _drop(self, connection: _Connection) -> None:
        with self._changed:
            self._selector.unregister(connection.sock)
            connection.sock.close()
            del self._connections[connection.sock]
            self._changed.notify_all()


def detect_vanished_host(sock: socket.socket) -> None:
    """Set TCP options of a socket, so that the kernel closes the socket if the other host vanishes while no data is on
    the way to it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def has_vanished(sock: socket.socket) -> bool:
    """Return whether the other host acknowledges nothing of the data on the way to it.

    With TCP_USER_TIMEOUT, the kernel would also close the connection to a stopped process that cannot take more data,
    although the host of this process answers all probes.
    """
    # Fields of the kernel's struct tcp_info: retransmits, probes, unacked, last_ack_recv.
    fields: tuple[int, int, int, int] = struct.unpack_from(
        "=2xBB20xI28xI", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    )
    retransmits, probes, unacked, silent_ms = fields
    is_silent = unacked > 0 and retransmits > 1 and silent_ms > _UNANSWERED_MS
    return is_silent or probes >= _UNANSWERED_PROBES


# Maximum number of characters of a log line in one frame; a longer line is sent in several frames. A character takes at
# most 12 bytes as JSON, so such a frame is always smaller than `MAX_FRAME_BYTES`.
_MAX_LOG_CHARACTERS = 2**16


class DriverConnection:
    """A worker's socket to the driver; the worker's process ends itself when the driver closes the connection.

    Args:
        node: Watch of the worker's node, if the worker belongs to a node of a local pool but Ray has not started it.
    """

    def __init__(self, host: str, port: int, token: str, rank: int, node: NodeWatch | None = None) -> None:
        self._sock = socket.create_connection((host, port), timeout=10)
        self._sock.settimeout(None)
        detect_vanished_host(self._sock)
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._unread = b""
        self._process = os.getpid()
        # Otherwise the driver would not see that the worker has ended until the processes that user code has forked
        # end, too.
        os.register_at_fork(after_in_child=self._sock.close)
        # A Ray worker is a child process of the raylet (Ray's process on the node), but continues to run when the
        # raylet dies. Ray itself notices a dead raylet only after 14 s, so this class checks every second whether the
        # raylet is still the parent process. The parent of other workers is the driver or the template of workers.
        self._parent = os.getppid()
        self._is_under_raylet = name_of(self._parent) == "raylet"
        self._node = node
        self._send(f"{token} {rank}".encode())
        threading.Thread(target=self._live, name="shoal-heartbeats", daemon=True).start()

    def log(self, text: str) -> None:
        """Send text to the driver, which prints it.

        Lone surrogates (invalid characters) are sent as escape sequences, because terminals cannot print them. A text
        that is too long for one frame is sent in several frames and printed as several lines.
        """
        # The driver cannot find a secret that is divided between two frames.
        shown = hide_known(text).encode(errors="backslashreplace").decode()
        if self._is_fork():  # such as a worker of a DataLoader; the driver prints the worker's standard output, too
            os.write(1, f"{shown}\n".encode())
            return
        for start in range(0, len(shown) or 1, _MAX_LOG_CHARACTERS):
            self._send(b"l" + json.dumps(shown[start : start + _MAX_LOG_CHARACTERS]).encode())

    def note(self, note: Mapping[str, Any]) -> None:
        """Send a note, such as the progress of the training, to the driver.

        Raises:
            TrainingError: User code has forked this process from the worker.
        """
        self._refuse_fork()
        self._send(b"n" + json.dumps(note).encode())

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Ask the driver a question, such as for the next trial of a search, and wait for the answer.

        Raises:
            TrainingError: User code has forked this process from the worker.
        """
        self._refuse_fork()
        with self._asking:
            self._send(b"q" + json.dumps(question).encode())
            return json.loads(self._answers.get())

    def done(self) -> None:
        """Tell the driver that the current call has ended and that all its log lines have been sent."""
        self._send(b"d")

    def _is_fork(self) -> bool:
        """Return whether user code has forked this process from the worker."""
        return os.getpid() != self._process

    def _refuse_fork(self) -> None:
        if self._is_fork():
            raise TrainingError(
                "a process that was forked in a worker cannot report metrics or other data of the worker: return them "
                "to the worker's own process, and report them there"
            )

    def _live(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._sock, selectors.EVENT_READ)
        if self._node:
            selector.register(self._node.process, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select(timeout=WORKER_HEARTBEAT_S)]
            if self._sock in ready:
                self._read_answers()
                ready.remove(self._sock)
            is_orphan = os.getppid() != self._parent
            if ready or (is_orphan and self._is_under_raylet):
                kind = self._node.kind if self._node else "raylet"
                self._leave_because(f"the {kind} of its node ended, {NODE_LOST}")
            if is_orphan:
                self._leave_because("the process that started it ended")
            if self._node and self._node.must_free_memory():
                self._leave_because(
                    "its machine has almost no memory left: use more nodes or larger ones, or fewer workers per node"
                )
            if has_vanished(self._sock):
                _leave()
            self._send_if_free(b"h")

    def _read_answers(self) -> None:
        """Read the driver's answers; end this process if the driver has closed the connection."""
        try:
            data = self._sock.recv(2**16)
        except OSError:
            _leave()
        if not data:
            _leave()
        *answers, self._unread = (self._unread + data).split(b"\n")
        for answer in answers:
            self._answers.put(answer)

    def _leave_because(self, cause: str) -> NoReturn:
        self._send_if_free(b"x" + json.dumps(cause).encode())
        _leave()

    def _send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self._sock.sendall(frame + b"\n")
        except OSError:
            _leave()

    def _send_if_free(self, frame: bytes) -> None:
        """Send a short frame, unless the driver takes no more data at present, because it is stopped."""
        if not self._sending.acquire(timeout=WORKER_HEARTBEAT_S):
            return
        try:
            writable = select.poll()
            writable.register(self._sock, select.POLLOUT)
            if writable.poll(0):
                self._sock.sendall(frame + b"\n")
        except OSError:
            _leave()
        finally:
            self._sending.release()


def _leave() -> NoReturn:
    # os._exit() ends the whole process at once. sys.exit() would end only the current thread, which may be a background
    # thread, and the main thread may be inside a library call that never returns.
    os._exit(1)
