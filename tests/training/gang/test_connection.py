from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.training.gang import connection
from shoal.training.gang.connection import EventKind, WorkerConnections
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

WORKER = """
import sys
from shoal.secrets.redaction import hiding
from shoal.training.gang.connection import DriverConnection
hidden = hiding(lambda text, goes_on=False: text.replace("s3cret", "***"))
hidden.__enter__()
host, port, token, rank = sys.argv[1:5]
line = DriverConnection(host, int(port), token, int(rank))
for text in sys.argv[5:]:
    line.log(text)
line.done()
for text in sys.stdin:
    line.log(text.strip())
import threading
threading.Event().wait()
"""


SIZE = 4
UNPRINTABLE = "unprintable"


class Heard:
    """The driver's end of the sockets, what it heard, and the worker processes."""

    def __init__(self) -> None:
        self.events: queue.Queue = queue.Queue()
        self.board = WorkerConnections("127.0.0.1", SIZE, self.listen)
        self.workers: list[subprocess.Popen] = []

    def listen(self, rank: int, kind: EventKind, text: str) -> None:
        if text == UNPRINTABLE:
            raise UnicodeError("as a terminal raises it")
        for line in text.split("\n"):
            self.events.put((rank, kind, line))

    def worker(self, rank: int, *lines: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-c",
            WORKER,
            self.board.host,
            str(self.board.port),
            self.board.token,
            str(rank),
            *lines,
        ]
        self.workers.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
        return self.workers[-1]

    def tell(self, worker: subprocess.Popen, text: str) -> None:
        """Have a worker log a line."""
        assert worker.stdin is not None
        print(text, file=worker.stdin, flush=True)

    def stranger(self) -> socket.socket:
        return socket.create_connection((self.board.host, self.board.port), timeout=30)

    def next(self) -> tuple[int, EventKind, str]:
        return self.events.get(timeout=30)


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.board.close()
    for worker in heard.workers:
        worker.kill()
        worker.communicate()


def test_lines_come_in_order_and_before_the_end_of_the_call(heard: Heard) -> None:
    heard.worker(3, "one", "two\nlines", "drei: ä")
    assert [heard.next() for _ in range(5)] == [
        *((3, EventKind.LINE, line) for line in ("one", "two", "lines", "drei: ä")),
        (3, EventKind.DONE, ""),
    ]
    assert heard.board.connected() == {3}


def test_a_killed_worker_is_missed(heard: Heard) -> None:
    worker = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    worker.kill()
    assert heard.next() == (0, EventKind.GONE, "its process was killed or crashed (its exit code is not known)")
    assert heard.board.wait_all_gone(30)


def test_workers_end_when_the_driver_hangs_up(heard: Heard) -> None:
    worker = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    heard.board.hang_up()
    assert worker.wait(30) == 1
    assert heard.board.wait_all_gone(30)


def test_a_stopped_worker_is_missed_but_not_gone(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WORKER_SILENCE_S", 3.0)
    worker = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    os.kill(worker.pid, signal.SIGSTOP)
    rank, kind, why = heard.next()
    assert (rank, kind) == (0, EventKind.GONE)
    assert "sent nothing for 3 s" in why
    assert not heard.board.wait_all_gone(0)
    worker.kill()
    assert heard.board.wait_all_gone(30)


def test_a_worker_waits_for_a_stopped_driver_that_cannot_take_its_lines() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen()
        args = ["127.0.0.1", str(server.getsockname()[1]), "token", "0", *["line" * 1000] * 100, "last"]
        with subprocess.Popen([sys.executable, "-c", WORKER, *args], stdin=subprocess.PIPE) as worker:
            driver, _ = server.accept()
            with driver, suppress(subprocess.TimeoutExpired):
                worker.wait(9)  # with TCP_USER_TIMEOUT, the kernel would close the connection after 4 s
            assert worker.poll() is None
            worker.kill()


@pytest.mark.parametrize(
    ("name", "cause"), [("raylet", "the raylet of its node ended"), ("driver", "the process that started it ended")]
)
def test_a_worker_ends_with_its_parent(heard: Heard, tmp_path: Path, name: str, cause: str) -> None:
    # A shell between us and the worker is the raylet, or a driver without Ray, here.
    (tmp_path / name).symlink_to("/bin/sh")
    args = [heard.board.host, str(heard.board.port), heard.board.token, "0"]
    parent = subprocess.Popen([tmp_path / name, "-c", '"$@" & wait', "sh", sys.executable, "-c", WORKER, *args])
    assert heard.next()[1] is EventKind.DONE
    parent.kill()
    parent.wait()
    rank, kind, why = heard.next()
    assert (rank, kind) == (0, EventKind.LEFT)
    assert cause in why
    assert heard.board.wait_all_gone(30)


def is_hung_up(stranger: socket.socket) -> bool:
    """Wait for the end of a connection; what was sent and not read turns it into a reset."""
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


def is_cut_off(stranger: socket.socket) -> bool:
    """Send a line without an end until nobody takes it."""
    try:
        while True:
            stranger.sendall(b"x" * 65_536)
    except ConnectionError:
        return True


HELLOS = [
    b'{"token": "", "rank": Infinity}\n',
    b"[" * 20_000 + b"\n",
    b'{"token": "guess", "rank": 0}\n',
    b"guess 0\n",
    "gueß 0\n".encode(),
    b"GET / HTTP/1.1\n",
    b"\0" * 1000 + b"\n",
    b"\n\n",
    b"x" * 300,  # without an end
]
WRONG_RANKS = [str(SIZE), "-1", "Infinity", "\u0663", "0" * 5000]


def test_strangers_are_hung_up_on_and_the_workers_go_on(heard: Heard) -> None:
    workers = [heard.worker(rank) for rank in (0, 1)]
    assert {heard.next()[:2] for _ in workers} == {(0, EventKind.DONE), (1, EventKind.DONE)}
    for hello in [*HELLOS, *(f"{heard.board.token} {rank}\n".encode() for rank in WRONG_RANKS)]:
        with heard.stranger() as stranger:
            stranger.sendall(hello)
            assert is_hung_up(stranger), hello
        for rank, worker in enumerate(workers):
            heard.tell(worker, "still here")
            assert heard.next() == (rank, EventKind.LINE, "still here"), hello
    assert heard.board.connected() == {0, 1}


def test_an_endless_line_is_cut_off(heard: Heard) -> None:
    worker = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    with heard.stranger() as stranger:
        assert is_cut_off(stranger)
    heard.tell(worker, "still here")
    assert heard.next() == (0, EventKind.LINE, "still here")


def test_whoever_says_no_hello_is_hung_up_on_after_a_while(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HELLO_SECONDS", 0.5)
    with heard.stranger() as stranger:
        assert is_hung_up(stranger)


def test_many_half_open_connections_keep_no_worker_out(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SPARE_CONNECTIONS", 3)
    monkeypatch.setattr(connection, "_HELLO_SECONDS", 300.0)  # it is not their silence that ends them
    strangers = [heard.stranger() for _ in range(3 * (SIZE + 3))]
    try:
        for number, stranger in enumerate(strangers[: -(SIZE + 3)]):  # the newest have their time to say hello
            assert is_hung_up(stranger), number
        wait_until(lambda: len(heard.board._connections) <= SIZE + 3, "the last one to be forgotten")
        worker = heard.worker(2, "hello")
        assert heard.next() == (2, EventKind.LINE, "hello")
        assert worker.poll() is None
    finally:
        for stranger in strangers:
            stranger.close()


FRAMES = [b"l[", b"l" + b"[" * 20_000, b"l\xff", b"n\xff", b"x{", b'l"' + UNPRINTABLE.encode() + b'"']


def test_a_malformed_frame_loses_its_worker_alone(heard: Heard) -> None:
    sound = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    for frame in FRAMES:
        with heard.stranger() as worker:
            worker.sendall(f"{heard.board.token} 1\n".encode() + frame + b"\n")
            rank, kind, why = heard.next()
            assert (rank, kind) == (1, EventKind.GONE), frame
            assert "cannot read" in why
            assert is_hung_up(worker)
        heard.tell(sound, "still here")
        assert heard.next() == (0, EventKind.LINE, "still here"), frame


def test_a_line_with_lone_surrogates_can_be_printed(heard: Heard) -> None:
    heard.worker(0, "a file named \udcff")
    assert heard.next() == (0, EventKind.LINE, "a file named \\udcff")


def test_a_secret_is_not_divided_between_frames(heard: Heard) -> None:
    heard.worker(0, "x" * (2**16 - 3) + "s3cret")
    assert heard.next() == (0, EventKind.LINE, "x" * (2**16 - 3) + "***")


def test_a_silent_stranger_is_not_waited_for(heard: Heard) -> None:
    with heard.stranger():
        wait_until(lambda: heard.board._connections, "the connection")
        assert heard.board.wait_all_gone(0)


def test_a_connection_that_the_network_ends_loses_its_worker_with_the_kernels_reason(heard: Heard) -> None:
    with heard.stranger() as worker:
        worker.sendall(f"{heard.board.token} 1\n".encode())
        assert heard.board.wait_joined(1, 30)
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
    assert heard.next() == (1, EventKind.GONE, "its host no longer answers (Connection reset by peer)")
    assert heard.board.wait_all_gone(30)
