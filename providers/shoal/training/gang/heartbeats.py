"""Detect lost workers: a worker counts as lost when its heartbeats stop or its socket to the driver closes.

There is one socket between the driver and each worker, which also tells the worker that its driver is dead.

Ray reports a dead actor quickly only if the actor's process ended. Ray detects a vanished node after five missed
health checks, which take about 15 s. A socket is faster: the kernel closes the socket of a killed process, and TCP
keepalive closes the socket of a host that no longer answers. The workers also send their log lines through this socket,
because an actor call for each round would take far more time and would need another actor.

A worker sends frames, each of which is one line of text. The first frame of a socket is the hello: the gang's token and
the worker's rank. Each later frame begins with a letter: ``h`` (heartbeat), ``d`` (a call is done), ``l`` with a log
line as JSON, ``n`` with a note for the driver as JSON, ``q`` with a question to the driver as JSON, or ``x`` with the
reason why the worker ends itself. The driver sends only the answers to questions, each as one line of JSON.

Any process on the host can connect. Therefore the hello must be short and must arrive within seconds, its token is
compared in constant time, and no other data is parsed before the hello is accepted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from shoal.own_pauses import waited_since
from shoal.training.timeouts import WORKER_HEARTBEAT_S, WORKER_SILENCE_S

NODE_LOST = "so the node is lost"
"""End of the reason for which a worker ends itself if its node has ended."""

# TCP settings with which the kernel detects a vanished host: it sends the first probe after 1 s without data, then one
# every second, and closes the connection after three unanswered probes. The kernel also closes the connection when sent
# data was not acknowledged for 4 s.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 4000),
)
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
    """The worker logged a line."""
    NOTE = "note"
    """The worker sent a note to the driver; the text is JSON."""
    QUESTION = "question"
    """The worker asked the driver a question, and waits for `WorkerConnections.answer`; the text is JSON."""
    DONE = "done"
    """The worker finished a call; all its log lines of this call were reported before."""


Listener = Callable[[int, EventKind, str], None]


@dataclass
class _Connection:
    """State of one accepted connection; `rank` is None until the connected process has identified itself as a
    worker."""

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
        size: Number of workers.
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
            return self._changed.wait_for(
                lambda: all(connection.rank != rank for connection in self._connections.values()), timeout
            )

    def wait_all_gone(self, timeout: float) -> bool:
        """Wait until the process of every connected worker has ended."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(connection.rank is None for connection in self._connections.values()), timeout
            )

    def hang_up(self) -> None:
        """Make the remaining workers end themselves, by closing one direction (driver to worker) of each socket.

        The other direction stays open, so that `wait_all_gone` notices when a worker's process has ended.
        """
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_WR)

    def answer(self, rank: int, text: str) -> None:
        """Send a worker the answer to its question, as JSON in one line. A worker that is gone gets none."""
        with self._changed:
            sock = next((each.sock for each in self._connections.values() if each.rank == rank), None)
        if sock is None:
            return
        rest = memoryview(f"{text}\n".encode())
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
        for frame in frames:
            if connection.rank is None:
                if not self._admit(connection, bytes(frame)):
                    self._drop(connection)
                    return
                continue
            try:
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
        if frame[:1] == b"l":
            self._listener(rank, EventKind.LINE, str(json.loads(frame[1:])))
        elif frame[:1] == b"n":
            self._listener(rank, EventKind.NOTE, frame[1:].decode())
        elif frame[:1] == b"q":
            self._listener(rank, EventKind.QUESTION, frame[1:].decode())
        elif frame[:1] == b"d":
            self._listener(rank, EventKind.DONE, "")
        elif frame[:1] == b"x":
            self._report(connection, str(json.loads(frame[1:])), EventKind.LEFT)

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
    """Set TCP options of a socket, so that the kernel closes the socket if the other host vanishes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
