"""An attempt's log: written by its driver into a file that outlives the pool, read by whoever follows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TextIO

from shoal.jobs.journal.attempts import Key
from shoal.state.home import home

LOG_NAME = "driver.log"


def log_path(key: Key) -> Path:
    """Where the driver of an attempt writes its log, on the head's machine."""
    return home() / "jobs" / key.job_id / str(key.attempt) / LOG_NAME


class LogFollower:
    """Reads an attempt's log bit by bit, in whole lines.

    From the driver's file where this is the head's machine: it holds what the driver says and nothing of Ray's own, and
    is there after the pool is gone. Else over HTTP.

    Args:
        key: The attempt.
        over_http: Reads all that Ray has of the log.
    """

    def __init__(self, key: Key, over_http: Callable[[], str]) -> None:
        self._path = log_path(key)
        self._over_http = over_http
        self._offset = 0

    def lines(self, *, ended: bool) -> Iterator[str]:
        """Lines that are new since the last call.

        Args:
            ended: Nothing more will be written: the last line counts though it is not finished.
        """
        new = self._new()
        taken = new if ended else new[: new.rfind(b"\n") + 1]
        self._offset += len(taken)
        if taken:
            yield from taken.decode(errors="replace").removesuffix("\n").split("\n")

    def _new(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                return file.read()
        except FileNotFoundError:
            return self._over_http().encode()[self._offset :]


class _Tee:
    """A text stream that writes to another and to a file, and nothing secret to either.

    What cannot be written (the disk is full, a stream is closed) is lost: a training run does not fail for its log.
    """

    def __init__(self, stream: TextIO, file: FileIO, redact: Callable[[str], str]) -> None:
        self._stream = stream
        self._file = file
        self._redact = redact

    def write(self, text: str) -> int:
        shown = self._redact(text).encode(errors="backslashreplace")  # lone surrogates are no UTF-8
        with suppress(OSError, ValueError):
            self._stream.write(shown.decode())
        with suppress(OSError):
            self._file.write(shown)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        return self._stream.encoding


@contextmanager
def teed(path: Path, redact: Callable[[str], str]) -> Iterator[None]:
    """Write what this process prints into a file too, for the block.

    Args:
        path: The file, made where it does not exist.
        redact: Takes out of a text what must not be shown.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    out, err = sys.stdout, sys.stderr
    with FileIO(path, "a") as file:  # unbuffered: closing it has nothing left to write, and cannot fail
        sys.stdout, sys.stderr = _Tee(out, file, redact), _Tee(err, file, redact)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err
