from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal.training.gang import lifeline
from shoal.training.gang.lifeline import EventKind, Switchboard
from tests.waiting import wait_until

WORKER = """
import sys
from shoal.training.gang.lifeline import Lifeline
host, port, token, rank = sys.argv[1:5]
line = Lifeline(host, int(port), token, int(rank))
for text in sys.argv[5:]:
    line.log(text)
line.done()
import threading
threading.Event().wait()
"""


class Heard:
    """A switchboard, what it heard, and the worker processes at its lines."""

    def __init__(self) -> None:
        self.events: queue.Queue = queue.Queue()
        self.board = Switchboard("127.0.0.1", lambda *event: self.events.put(event))
        self.workers: list[subprocess.Popen] = []

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
        self.workers.append(subprocess.Popen(command))
        return self.workers[-1]

    def next(self) -> tuple[int, EventKind, str]:
        return self.events.get(timeout=30)


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.board.close()
    for worker in heard.workers:
        worker.kill()
        worker.wait()


def test_lines_come_in_order_and_before_the_end_of_the_call(heard: Heard) -> None:
    heard.worker(3, "one", "two\nlines", "drei: ä")
    assert [heard.next() for _ in range(4)] == [
        (3, EventKind.LINE, "one"),
        (3, EventKind.LINE, "two\nlines"),
        (3, EventKind.LINE, "drei: ä"),
        (3, EventKind.DONE, ""),
    ]
    assert heard.board.connected() == {3}


def test_a_killed_worker_is_missed(heard: Heard) -> None:
    worker = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    worker.kill()
    assert heard.next() == (0, EventKind.GONE, "its process was killed or crashed")
    assert heard.board.wait_all_gone(30)


def test_workers_end_when_the_driver_hangs_up(heard: Heard) -> None:
    worker = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    heard.board.hang_up()
    assert worker.wait(30) == 1
    assert heard.board.wait_all_gone(30)


def test_a_stopped_worker_is_missed_but_not_gone(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_SILENCE_SECONDS", 3.0)
    worker = heard.worker(0)
    assert heard.next()[1] is EventKind.DONE
    os.kill(worker.pid, signal.SIGSTOP)
    rank, kind, why = heard.next()
    assert (rank, kind) == (0, EventKind.GONE)
    assert "silent for 3 s" in why
    assert not heard.board.wait_all_gone(0)
    worker.kill()
    assert heard.board.wait_all_gone(30)


def test_a_worker_ends_with_its_raylet(heard: Heard) -> None:
    # A shell between us and the worker is the raylet here.
    args = [heard.board.host, str(heard.board.port), heard.board.token, "0"]
    raylet = subprocess.Popen(["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", WORKER, *args])
    assert heard.next()[1] is EventKind.DONE
    raylet.kill()
    raylet.wait()
    rank, kind, why = heard.next()
    assert (rank, kind) == (0, EventKind.GONE)
    assert "raylet" in why
    assert heard.board.wait_all_gone(30)


@pytest.mark.parametrize("hello", [b'{"token": "guess", "rank": 0}\n', b"GET / HTTP/1.1\n", b'{"rank": 0}\n', b"[]\n"])
def test_strangers_are_hung_up_on(heard: Heard, hello: bytes) -> None:
    with socket.create_connection((heard.board.host, heard.board.port)) as stranger:
        stranger.sendall(hello)
        stranger.settimeout(30)
        assert stranger.recv(1) == b""
    assert heard.events.empty()


def test_a_silent_stranger_is_not_waited_for(heard: Heard) -> None:
    with socket.create_connection((heard.board.host, heard.board.port)):
        wait_until(lambda: heard.board._lines, "the connection")
        assert heard.board.wait_all_gone(0)
