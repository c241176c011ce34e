"""Exchange messages with another process over a socket until that process ends.

User code in the other process may fork, and its children may live on with the other end of the socket. So the channel
ends with the process, and not when the last of them closes the socket, and each message names the process that has sent
it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import Self

_HEADER = struct.Struct("!IQ")
"""Process id of the sender, and number of bytes of the message."""

_CHUNK_BYTES = 2**20


class ProcessChannel:
    """One end of a socket to another process.

    Args:
        sock: This process's end.
        process: Id of the other process, which no other thread may reap before the channel is made; None: the channel
            ends when the other end of the socket is closed, because no user code runs there.
    """

    def __init__(self, sock: socket.socket, process: int | None = None) -> None:
        self.socket = sock
        self._sender = process
        self._pidfd = None if process is None else os.pidfd_open(process)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        for poll in (self._readable, self._writable):
            if self._pidfd is not None:
                poll.register(self._pidfd, select.POLLIN)
        self._received = bytearray()
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def descriptors(self) -> list[int]:
        """Return the descriptors of which one is readable when a message arrives or the other process has ended."""
        return [self.socket.fileno(), *([] if self._pidfd is None else [self._pidfd])]

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: The other process has ended.
        """
        header = _HEADER.pack(os.getpid(), len(message))
        # Most messages are short, and a system call for each of two parts would cost more than a copy.
        for part in (header + message,) if len(message) < _CHUNK_BYTES else (header, message):
            rest = memoryview(part)
            while rest:
                if self._pidfd in [descriptor for descriptor, _ in self._writable.poll()]:
                    raise BrokenPipeError("the other process has ended")
                try:
                    rest = rest[self.socket.send(rest[:_CHUNK_BYTES], socket.MSG_DONTWAIT) :]
                except BlockingIOError:  # the socket has little room
                    continue

    def receive(self) -> bytes:
        """Wait for the next message that the other process itself has sent, and return it.

        Raises:
            EOFError: The other process has ended, and all its messages were received.
        """
        message = self._next(wait=True)
        assert message is not None
        return message

    def receive_at_once(self) -> bytes | None:
        """Return the next message as :meth:`receive` does, but None if it is not complete yet."""
        return self._next(wait=False)

    def _next(self, *, wait: bool) -> bytes | None:
        while True:
            missing = self._missing()
            if missing == 0:
                sender, _ = _HEADER.unpack_from(self._received)
                message, self._received = bytes(memoryview(self._received)[_HEADER.size :]), bytearray()
                if self._sender in (None, sender):
                    return message
                continue
            if not self._has_data(wait=wait):
                return None
            # No byte of a later message is read, because descriptors may follow this message.
            received = self.socket.recv(min(missing, _CHUNK_BYTES))
            if not received:
                raise EOFError
            self._received += received

    def close(self) -> None:
        """Close this process's end of the socket."""
        self.socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _missing(self) -> int:
        """Return how many bytes of the header or of the message are missing."""
        if len(self._received) < _HEADER.size:
            return _HEADER.size - len(self._received)
        return _HEADER.size + int(_HEADER.unpack_from(self._received)[1]) - len(self._received)

    def _has_data(self, *, wait: bool) -> bool:
        ready = {descriptor for descriptor, _ in self._readable.poll(None if wait and not self._has_ended else 0)}
        if self.socket.fileno() in ready:
            return True
        if self._has_ended:
            raise EOFError
        # The process may have sent a message after the socket was looked at, and before it ended.
        self._has_ended = self._pidfd in ready
        return self._has_ended and self._has_data(wait=False)
