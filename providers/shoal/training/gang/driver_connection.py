"""Send a worker's heartbeats, log lines, notes and questions to the driver, and end the worker if the driver is dead.

The format of the data is described in `shoal.training.gang.heartbeats`, which is the driver's end of the sockets.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from shoal.errors import TrainingError
from shoal.training.gang.heartbeats import NODE_LOST, detect_vanished_host
from shoal.training.gang.local_node import NodeWatch, name_of
from shoal.training.timeouts import WORKER_HEARTBEAT_S

# Maximum number of characters of a log line in one frame; a longer line is sent in several frames. A character takes at
# most 12 bytes as JSON, so such a frame is always smaller than `MAX_FRAME_BYTES`.
_MAX_LOG_CHARACTERS = 2**16


class DriverConnection:
    """A worker's socket to the driver; the worker's process ends itself when the driver closes the connection.

    Args:
        host: Address at which the driver listens.
        port: Port at which the driver listens.
        token: Token of the gang.
        rank: Rank of this worker.
        hide: Function that removes secrets from a text.
        node: Watch of the worker's node, if the worker belongs to a node of a local pool but Ray has not started it.
    """

    def __init__(
        self, host: str, port: int, token: str, rank: int, hide: Callable[[str], str], node: NodeWatch | None = None
    ) -> None:
        self._hide = hide
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
        shown = self._hide(text).encode(errors="backslashreplace").decode()
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
            self._send(b"h")

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
        self._send(b"x" + json.dumps(cause).encode())
        _leave()

    def _send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self._sock.sendall(frame + b"\n")
        except OSError:
            _leave()


def _leave() -> NoReturn:
    # os._exit() ends the whole process at once. sys.exit() would end only the current thread, which may be a background
    # thread, and the main thread may be inside a library call that never returns.
    os._exit(1)
