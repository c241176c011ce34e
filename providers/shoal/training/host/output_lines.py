"""Divide the output of a worker into lines for the log of its job, in a time that is linear in the output's size."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator

from shoal.secrets.redaction import hide_known, hide_known_so_far
from shoal.training.timeouts import PROGRESS_LINE_PERIOD_S

_LONGEST_LINE = 2**16
"""Number of bytes after which a text without a newline is divided, so that it takes little memory and gets into the
log."""

LOOK_EVERY_S = 1.0
"""Seconds between two calls of :meth:`OutputLines.look`."""


class OutputLines(io.RawIOBase):
    """Binary stream that passes the lines of the written bytes to a function.

    A progress bar overwrites its line many times: it writes a carriage return and then the new text. Only the last text
    of a line is passed on. A longer text without a newline is divided, after a space if there is one.

    Args:
        show: Function to call with new lines.
    """

    def __init__(self, show: Callable[[list[str]], None]) -> None:
        self._show = show
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
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + PROGRESS_LINE_PERIOD_S
        held = bytes(self._held)
        is_due, self._is_old = self._is_old and held != self._shown, bool(held)
        if is_due:
            self._shown = held
            visible, _, last = held.rpartition(b"\r")
            text = _text(visible) if visible else hide_known_so_far(_text(last))
            beginning, _, word = text.rpartition(" ")
            if not visible and any(mark in word for mark in ":=@\"'"):  # perhaps the beginning of credentials
                text = beginning
            self._show([text if visible else f"{text.rstrip()} ..."])

    def end(self) -> None:
        """Pass on the line in progress."""
        if self._held:
            self._show([_text(bytes(self._held))])
            self._held.clear()

    def _divide(self) -> None:
        # A secret that begins before a cut is complete by now, and must not be divided.
        text = hide_known(self._held.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        at, lines = 0, []
        while len(text) - at > 2 * _LONGEST_LINE:
            end = text.rfind(b" ", at, at + _LONGEST_LINE) + 1 or at + _LONGEST_LINE
            lines.append(_text(text[at:end]))
            at = end
        self._held = bytearray(text[at:])
        self._show(lines)


@contextlib.contextmanager
def looked_at(lines: OutputLines) -> Iterator[None]:
    """Show a line in progress from time to time while the ``with`` block runs, and the last line when it ends."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_EVERY_S):
            lines.look()

    thread = threading.Thread(target=look, name="shoal-line-in-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        lines.end()


def _text(line: bytes) -> str:
    # Python's other handlers of invalid bytes are 20 times slower.
    return line.decode(errors="replace").rstrip().rpartition("\r")[2]
