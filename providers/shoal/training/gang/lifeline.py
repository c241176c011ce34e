"""A socket between the driver and each worker of its gang, by which each knows at once that the other is gone.

Ray tells of a dead actor too, but only where the actor's process ended: of a node that vanished it learns after five
missed health checks, about 15 s. Here the kernel tells: a killed process closes its socket, and a host that no longer
answers fails the keepalive. The socket carries the workers' log lines as well, which is far cheaper than an actor call
per round and needs no actor.

Frames are lines, worker to driver only: a hello, which is the gang's token and the worker's rank, then ``h`` (a
heartbeat), ``d`` (a call is done), ``l`` with a line of log as JSON, ``n`` with a note for the driver as JSON, and
``x`` with the reason why the worker ends itself.

Any process of the host can connect. Nothing that a connection sends before its hello is parsed: the hello is a short
line, due within seconds, and its token is compared in constant time.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_HEARTBEAT_SECONDS = 1.0
# A stopped process still has a kernel that answers keepalives. Python's own threads stand still while a C extension is
# loaded from a cold disk (seconds), so silence is given more time than a vanished host.
_SILENCE_SECONDS = 20.0
# A host that vanished: first probe after 1 s of silence, then every second; heartbeats of the other side that stay
# unacknowledged for 3 s.
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 4000),
)
# A frame is a line of log, or a note of a few metrics.
_MAX_FRAME_BYTES = 2**20
# Characters of one frame of log: each takes at most 12 bytes as JSON.
_MAX_LOG_CHARACTERS = 2**16
# A token of 32 characters, and a rank.
_MAX_HELLO_BYTES = 256
# A worker says hello right after it has connected; on a busy machine it may not get its turn at once.
_HELLO_SECONDS = 10.0
# Connections without a hello that are kept beside one per worker; beyond that, the oldest is closed.
_SPARE_CONNECTIONS = 64


class EventKind(Enum):
    """What the switchboard heard."""

    GONE = "gone"
    """The connection ended: the worker's process, or its host, is gone. The text says which it was."""
    LINE = "line"
    """The worker logged a line."""
    NOTE = "note"
    """The worker told the driver something; the text is JSON."""
    DONE = "done"
    """The worker finished a call; all that it logged during the call came before."""


Listener = Callable[[int, EventKind, str], None]


@dataclass
class _Line:
    """One accepted connection; `rank` is None until it has sent a valid hello."""

    sock: socket.socket
    opened: float
    heard: float
    rank: int | None = None
    reported: bool = False
    buffer: bytearray = field(default_factory=bytearray)


class Switchboard:
    """The driver's end of all the lifelines of a gang.

    Args:
        host: Address to listen on; the workers must reach it.
        size: Number of workers.
        listener: Called, from the switchboard's own thread, with rank, kind and text.
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
        self._lines: dict[socket.socket, _Line] = {}
        self._joined: set[int] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="shoal-lifelines", daemon=True)
        self._thread.start()

    def connected(self) -> set[int]:
        """Ranks whose processes are alive."""
        with self._changed:
            return {line.rank for line in self._lines.values() if line.rank is not None}

    def wait_joined(self, number: int, timeout: float) -> bool:
        """Waits until so many workers have said hello, whether or not they are still there.

        Args:
            number: How many.
            timeout: Seconds to wait at most.

        Returns:
            False if one has not.
        """
        with self._changed:
            return self._changed.wait_for(lambda: len(self._joined) >= number, timeout)

    def wait_all_gone(self, timeout: float) -> bool:
        """Waits until every worker's process has ended.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            False if one was still there.
        """
        with self._changed:
            return self._changed.wait_for(lambda: all(line.rank is None for line in self._lines.values()), timeout)

    def hang_up(self) -> None:
        """Has the workers that are still there end themselves; the lines stay open, to see them go."""
        with self._changed:
            for line in self._lines.values():
                with contextlib.suppress(OSError):
                    line.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes all lines and stops listening."""
        self._closing = True
        with contextlib.suppress(OSError):  # the thread may have looked in between, and closed it already
            self._wake_in.send(b"x")
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(timeout=_HEARTBEAT_SECONDS):
                    if key.fileobj is self._server:
                        self._accept()
                    # A connection may have been closed since the selector reported it, to make room for another.
                    elif line := self._lines.get(key.fileobj):  # type: ignore[call-overload]
                        self._read(line)
                self._check_silence()
        finally:
            for line in list(self._lines.values()):
                self._drop(line)
            for sock in (self._server, self._wake_out, self._wake_in):
                sock.close()
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            sock.setblocking(False)
            _watch(sock)
            self._selector.register(sock, selectors.EVENT_READ)
            now = time.monotonic()
            with self._changed:
                self._lines[sock] = _Line(sock, opened=now, heard=now)
        strangers = [line for line in self._lines.values() if line.rank is None]
        if len(strangers) > self._size + _SPARE_CONNECTIONS:
            self._drop(strangers[0])

    def _read(self, line: _Line) -> None:
        try:
            data = line.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as exc:
            self._lost(line, f"its host stopped answering ({exc.strerror})")
            return
        if not data:
            self._lost(line, "its process was killed or crashed")
            return
        line.heard = time.monotonic()
        line.buffer += data
        *frames, rest = line.buffer.split(b"\n")
        line.buffer = rest
        for frame in frames:
            if line.rank is None:
                if not self._admit(line, bytes(frame)):
                    self._drop(line)
                    return
                continue
            try:
                self._handle(line, line.rank, bytes(frame))
            except Exception as exc:
                # Whatever one worker sends, the others' lifelines stay.
                self._lost(line, f"it sent a frame that the driver cannot take ({type(exc).__name__}: {exc})")
                return
        if line.rank is None and len(rest) > _MAX_HELLO_BYTES:
            self._drop(line)
        elif len(rest) > _MAX_FRAME_BYTES:
            self._lost(line, "it sent a line without an end")

    def _admit(self, line: _Line, hello: bytes) -> bool:
        """Take a connection's first frame; False if it is not the hello of a worker of this gang."""
        token, _, rank = hello.partition(b" ")
        if len(hello) > _MAX_HELLO_BYTES or not hmac.compare_digest(token, self.token.encode()):
            return False
        if not rank.isdigit() or int(rank) >= self._size:
            return False
        with self._changed:
            line.rank = int(rank)
            self._joined.add(line.rank)
            self._changed.notify_all()
        return True

    def _handle(self, line: _Line, rank: int, frame: bytes) -> None:
        """Take a frame of a worker.

        Raises:
            Exception: The frame is malformed, or the listener cannot take it.
        """
        if frame[:1] == b"l":
            self._listener(rank, EventKind.LINE, str(json.loads(frame[1:])))
        elif frame[:1] == b"n":
            self._listener(rank, EventKind.NOTE, frame[1:].decode())
        elif frame[:1] == b"d":
            self._listener(rank, EventKind.DONE, "")
        elif frame[:1] == b"x":
            self._report(line, str(json.loads(frame[1:])))

    def _check_silence(self) -> None:
        now = time.monotonic()
        for line in list(self._lines.values()):
            if line.rank is None:
                if now - line.opened > _HELLO_SECONDS:
                    self._drop(line)
            elif now - line.heard > _SILENCE_SECONDS:
                # The line stays, to see the process end.
                self._report(
                    line, f"its process has been silent for {_SILENCE_SECONDS:.0f} s: stopped, or starved of CPU"
                )

    def _lost(self, line: _Line, why: str) -> None:
        self._drop(line)
        self._report(line, why)

    def _report(self, line: _Line, why: str) -> None:
        if line.rank is not None and not line.reported:
            line.reported = True
            self._listener(line.rank, EventKind.GONE, why)

    def _drop(self, line: _Line) -> None:
        with self._changed:
            self._selector.unregister(line.sock)
            line.sock.close()
            del self._lines[line.sock]
            self._changed.notify_all()


class Lifeline:
    """A worker's end: while it stands, the driver knows that this process lives; when the driver hangs up, this process
    ends.

    Args:
        host: Address of the driver's switchboard.
        port: Its port.
        token: Its token.
        rank: Rank of this worker.
    """

    def __init__(self, host: str, port: int, token: str, rank: int) -> None:
        self._sock = socket.create_connection((host, port), timeout=10)
        self._sock.settimeout(None)
        _watch(self._sock)
        self._sending = threading.Lock()
        # Ray's workers are children of their node's raylet, but outlive it; Ray itself notices a dead raylet after 14
        # s.
        self._raylet = os.getppid()
        self._send(f"{token} {rank}".encode())
        threading.Thread(target=self._live, name="shoal-lifeline", daemon=True).start()

    def log(self, text: str) -> None:
        """Has the driver print a line, or several; lone surrogates, which no terminal takes, as escapes.

        A line that is too long for a frame arrives as several.
        """
        shown = text.encode(errors="backslashreplace").decode()
        for start in range(0, len(shown) or 1, _MAX_LOG_CHARACTERS):
            self._send(b"l" + json.dumps(shown[start : start + _MAX_LOG_CHARACTERS]).encode())

    def note(self, note: Mapping[str, Any]) -> None:
        """Tells the driver something.

        Args:
            note: Plain data.
        """
        self._send(b"n" + json.dumps(note).encode())

    def done(self) -> None:
        """Says that a call is done."""
        self._send(b"d")

    def _live(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._sock, selectors.EVENT_READ)
        while True:
            # The driver never speaks: what can be read is its end.
            if selector.select(timeout=_HEARTBEAT_SECONDS):
                _leave()
            if os.getppid() != self._raylet:
                self._send(b"x" + json.dumps("its node's raylet ended, and with it the node").encode())
                _leave()
            self._send(b"h")

    def _send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self._sock.sendall(frame + b"\n")
        except OSError:
            _leave()


def _watch(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _leave() -> None:
    # Not sys.exit: the main thread may be inside a library that never returns.
    os._exit(1)
