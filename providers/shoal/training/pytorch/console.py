"""What a rank prints, where the training's caller reads it, and whose it is."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator


class Tagged(io.TextIOBase):
    """A stream that hands on whole lines, each with its rank in front.

    Args:
        tag: What stands in front.
        log: Takes a line.
    """

    def __init__(self, tag: str, log: Callable[[str], None]) -> None:
        self._tag = tag
        self._log = log
        self._rest = ""

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Hands on the lines that are complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._hand_on(line)
        return len(text)

    def close(self) -> None:
        """Hands on what has no end."""
        if self._rest:
            self._hand_on(self._rest)
            self._rest = ""
        super().close()

    def _hand_on(self, line: str) -> None:
        # Of a progress bar that rewrites its line, what it came to.
        self._log(f"{self._tag} {line.rstrip().rpartition(chr(13))[2]}")


@contextlib.contextmanager
def tagged_output(rank: int, log: Callable[[str], None]) -> Iterator[None]:
    """Sends what Python code prints in the block, to standard output or error, to the caller.

    Args:
        rank: Who prints.
        log: Takes a line.
    """
    with (
        contextlib.closing(Tagged(f"[rank {rank}]", log)) as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        yield
