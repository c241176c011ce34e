"""Send the output of each rank to the driver, with the rank in front of each line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator


class Tagged(io.TextIOBase):
    """Text stream that passes each complete line to a function, with a tag such as ``[rank 0]`` in front of the line.

    Args:
        tag: Text to put in front of each line, such as ``[rank 0]``.
        log: Function to call with each line.
    """

    def __init__(self, tag: str, log: Callable[[str], None]) -> None:
        self._tag = tag
        self._log = log
        self._rest = ""

    def writable(self) -> bool:
        """Return True, because text can be written to this stream."""
        return True

    def write(self, text: str) -> int:
        """Pass each complete line to the `log` function, and keep an incomplete last line until the rest of the line is
        written."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._log_line(line)
        return len(text)

    def close(self) -> None:
        """Pass an incomplete last line, if any, to the `log` function, and close the stream."""
        if self._rest:
            self._log_line(self._rest)
            self._rest = ""
        super().close()

    def _log_line(self, line: str) -> None:
        # A progress bar overwrites its line many times: it writes a carriage return and then the new text. Only the
        # text after the last carriage return is logged, so that the log contains the line once.
        self._log(f"{self._tag} {line.rstrip().rpartition(chr(13))[2]}")


@contextlib.contextmanager
def tagged_output(rank: int, log: Callable[[str], None]) -> Iterator[None]:
    """Send each line of Python's standard output and standard error to the function `log` until the ``with`` block
    ends.
    """
    with (
        contextlib.closing(Tagged(f"[rank {rank}]", log)) as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield
