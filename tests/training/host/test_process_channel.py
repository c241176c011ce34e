from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from shoal.training.host.process_channel import ProcessChannel

pytestmark = pytest.mark.processes

BIG = bytes(range(256)) * 2**14
"""A message that does not fit into the socket."""

FORKS = [os.fork, ctypes.CDLL(None).fork]
"""Python's fork, and one of which Python knows nothing, as that of a C library."""

Start = Callable[[Callable[[ProcessChannel], object]], ProcessChannel]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that calls a function with its end of a channel. The test kills it and its children."""
    with contextlib.ExitStack() as open_channels:

        def end(pid: int) -> None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

        def started(run: Callable[[ProcessChannel], object]) -> ProcessChannel:
            ours, theirs = socket.socketpair()
            if not (pid := os.fork()):
                try:
                    os.setpgid(0, 0)
                    ours.close()
                    run(ProcessChannel(theirs))
                finally:
                    os._exit(0)
            with contextlib.suppress(PermissionError):  # the process has done so already
                os.setpgid(pid, pid)
            theirs.close()
            open_channels.callback(end, pid)
            return open_channels.enter_context(ProcessChannel(ours, pid))

        yield started


def leave_a_child(fork: Callable[[], int]) -> None:
    if not fork():
        signal.pause()


@pytest.mark.parametrize("fork", FORKS, ids=["python", "C"])
def test_a_channel_ends_with_its_process_though_a_child_holds_the_socket(start: Start, fork: Callable[[], int]) -> None:
    def answer(channel: ProcessChannel) -> None:
        leave_a_child(fork)
        channel.send(channel.receive())
        os.kill(os.getpid(), signal.SIGKILL)

    channel = start(answer)
    channel.send(BIG)
    assert channel.receive() == BIG
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(BrokenPipeError):
        channel.send(BIG)


def test_a_message_that_the_process_has_not_sent_to_its_end_is_no_message(start: Start) -> None:
    def half(channel: ProcessChannel) -> None:
        leave_a_child(os.fork)
        channel.socket.sendall(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(EOFError):
        start(half).receive()


@pytest.mark.parametrize("fork", FORKS, ids=["python", "C"])
def test_a_message_of_a_child_is_none_of_its_parent(start: Start, fork: Callable[[], int]) -> None:
    def both(channel: ProcessChannel) -> None:
        if pid := fork():
            os.waitpid(pid, 0)
            channel.send(b"of the process")
        else:
            channel.send(b"of its child")

    channel = start(both)
    assert channel.receive() == b"of the process"
    with pytest.raises(EOFError):
        channel.receive()


def test_no_message_is_waited_for(start: Start) -> None:
    channel = start(lambda channel: channel.send(channel.receive()))
    assert channel.receive_at_once() is None
    channel.send(b"")
    assert channel.receive() == b""
