"""Send the output of a rank to the driver, with the rank in front of each line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator


class Tagged(io.TextIOBase):
    """A text stream that passes on complete lines with a tag in front of each.

    Args:
        tag: Text to put in front of each line, such as ``[rank 0]``.
        log: Function to call with each line.
    """

    def __init__(self, tag: str, log: Callable[[str], None]) -> None:
        self._tag = tag
        self._log = log
        self._rest = ""

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Pass on the complete lines, and keep the rest until its end is written."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._hand_on(line)
        return len(text)

    def close(self) -> None:
        """Pass on the last line if it has no line break."""
        if self._rest:
            self._hand_on(self._rest)
            self._rest = ""
        super().close()

    def _hand_on(self, line: str) -> None:
        # A progress bar rewrites its line after a carriage return. Only its last state is passed on.
        self._log(f"{self._tag} {line.rstrip().rpartition(chr(13))[2]}")


@contextlib.contextmanager
def tagged_output(rank: int, log: Callable[[str], None]) -> Iterator[None]:
    """Redirect standard output and standard error of Python code within the ``with`` block to `log`.

    Args:
        rank: Rank to put in front of each line.
        log: Function to call with each line.
    """
    with (
        contextlib.closing(Tagged(f"[rank {rank}]", log)) as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield
