"""Divide the output of a worker into lines for the log of its job, in a time that is linear in the output's size."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from weakref import WeakSet

from shoal.secrets.redaction import hide_known, hide_known_so_far
from shoal.training.host.own_process import repeating
from shoal.training.timeouts import PROGRESS_LINE_PERIOD_S

_LONGEST_LINE = 2**16
"""Number of bytes after which a text without a newline is divided, so that it takes little memory and gets into the
log."""

LOOK_EVERY_S = 1.0
"""Seconds between two calls of :meth:`OutputLines.look`."""

_CREDENTIALS_MAY_BEGIN = re.compile(r"[\"']|\S*://")
"""What credentials with spaces may begin with. They are complete, and thus hidden, only when the line is complete."""

_streams: WeakSet[OutputLines] = WeakSet()


class OutputLines(io.RawIOBase):
    """Binary stream that passes the lines of the written bytes to a function.

    A progress bar overwrites its line many times: it writes a carriage return and then the new text. Only the last text
    of a line is passed on. A longer text without a newline is divided, after a space if there is one. Several threads
    may write.

    Args:
        show: Function to call with new lines.
    """

    def __init__(self, show: Callable[[list[str]], None]) -> None:
        self._show = show
        self._lock = threading.RLock()  # a signal handler may print while this thread writes
        _streams.add(self)
        self._held = bytearray()  # the line in progress; before a carriage return, only the text that is visible
        self._shown = b""
        self._is_old = False
        self._look_at = time.monotonic() + PROGRESS_LINE_PERIOD_S

    def writable(self) -> bool:
        """Return True, because bytes can be written to this stream."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Pass each complete line to the `show` function, and keep the line in progress."""
        data = bytes(data)
        with self._lock:
            self._held += data
            if b"\n" in data:
                *lines, rest = bytes(self._held).split(b"\n")
                self._held, self._is_old = bytearray(rest), False
                self._show([_text(line) for line in lines])
            if b"\r" in data:
                *overwritten, last = bytes(self._held).split(b"\r")
                visible = next(filter(None, reversed(overwritten)), b"")
                self._held = bytearray(b"\r".join([visible, last] if overwritten else [last]))
            if len(self._held) > 2 * _LONGEST_LINE:
                self._divide()
        return len(data)

    def look(self) -> None:
        """Pass on what is visible of a line that has been in progress for at least 10 s, at most every 10 s.

        Without a carriage return, the line is passed on again when it is complete. Until then, its end is left out if a
        secret may begin there.
        """
        with self._lock:
            if time.monotonic() < self._look_at:
                return
            self._look_at = time.monotonic() + PROGRESS_LINE_PERIOD_S
            held = bytes(self._held)
            is_due, self._is_old = self._is_old and held != self._shown, bool(held)
            if is_due:
                self._shown = held
                visible, _, last = held.rpartition(b"\r")
                self._show([_text(visible) if visible else f"{_shown_so_far(last)} ..."])

    def end(self) -> None:
        """Pass on the line in progress."""
        with self._lock:
            if self._held:
                self._show([_text(bytes(self._held))])
                self._held.clear()

    def _divide(self) -> None:
        # A secret that begins before a cut is complete by now, and must not be divided.
        text = hide_known(self._held.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        at, lines = 0, []
        while len(text) - at > 2 * _LONGEST_LINE:
            end = text.rfind(b" ", at, at + _LONGEST_LINE) + 1 or at + _LONGEST_LINE
            while text[end] & 0xC0 == 0x80 and end > at + _LONGEST_LINE - 4:  # in a character of several bytes
                end -= 1
            lines.append(_text(text[at:end]))
            at = end
        self._held = bytearray(text[at:])
        if lines:
            self._show(lines)


def _renew_locks() -> None:
    """Renew the locks in a forked process, in which the thread that holds one does not run."""
    for stream in _streams:
        stream._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


@contextlib.contextmanager
def looked_at(lines: OutputLines) -> Iterator[None]:
    """Show a line in progress from time to time while the ``with`` block runs, and the last line when it ends."""
    try:
        with repeating(lines.look, LOOK_EVERY_S, "shoal-line-in-progress"):
            yield
    finally:
        lines.end()


def _shown_so_far(line: bytes) -> str:
    """Return the beginning of a line in progress, up to where a secret may begin."""
    # Without the bytes of an incomplete character at the end, before which a secret may begin.
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(line).rstrip()
    text = hide_known_so_far(whole)
    beginning, _, word = text.rpartition(" ")
    if any(mark in word for mark in ":=@"):  # perhaps the beginning of credentials
        text = beginning
    return _CREDENTIALS_MAY_BEGIN.split(text, maxsplit=1)[0].rstrip()


def _text(line: bytes) -> str:
    # Python's other handlers of invalid bytes are 20 times slower.
    return line.decode(errors="replace").rstrip().rpartition("\r")[2]
