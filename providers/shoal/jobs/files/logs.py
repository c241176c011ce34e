"""Write and read the log of an attempt. The log is a file on the head's machine, which is kept when the pool ends."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TextIO

from shoal.errors import printable
from shoal.jobs.credentials import OutputFilter
from shoal.jobs.journal.attempts import Key
from shoal.new_files import create_folder
from shoal.state.home import home

LOG_NAME = "driver.log"


def log_path(key: Key) -> Path:
    """Return the path of an attempt's log on the head's machine."""
    return home() / "jobs" / key.folder / LOG_NAME


_TAIL_BYTES = 2**17
"""Number of bytes at the end of a log in which the tracebacks of a failed function are searched."""
LIMIT_BYTES = 2**26
"""Number of bytes of a log after which further output is left out, except for its end. A function that prints without
end must not fill the disk of the store."""
_NOTICE = (
    f"\n[this log has reached {LIMIT_BYTES // 2**20} MiB: further output is left out, except for its last "
    f"{_TAIL_BYTES // 2**10} KiB, which are written when the job ends. Print less, or write to a file]\n"
).encode()
_TRACEBACK = re.compile(r"^In rank \d+ \(.*?(?=^In rank \d+ \(|^failed: |\Z)", re.MULTILINE | re.DOTALL)


class LogFollower:
    """Reader of an attempt's log that returns only the new lines at each call.

    On the head's machine, the reader uses the driver's own file, which has no lines of Ray and is kept when the pool
    ends. On other machines, where that file does not exist, the reader gets Ray's copy of the log over HTTP.

    Args:
        key: The attempt.
        over_http: Function that returns Ray's copy of the whole log.
        position: Value of the attribute `position` of an earlier reader, which has returned all lines before this
            position.

    Attributes:
        position: Number of bytes of the log that were returned as lines. A negative number counts bytes of Ray's copy,
            whose content differs from the driver's file. If the source of the log changes, the reader begins with the
            first line again.
    """

    def __init__(self, key: Key, over_http: Callable[[], str], position: int = 0) -> None:
        self._path = log_path(key)
        self._over_http = over_http
        self.position = position

    def tracebacks(self) -> list[str]:
        """Return the tracebacks of the ranks of a failed function, which the driver prints at the end of its log."""
        with suppress(FileNotFoundError):
            self.position = max(0, self._path.stat().st_size - _TAIL_BYTES)
        text = "\n".join(self.lines(ended=True))[-_TAIL_BYTES:]
        return [found.strip() for found in _TRACEBACK.findall(text)]

    @property
    def has_file(self) -> bool:
        """Return whether the log file that the driver writes is on this machine."""
        return self._path.exists()

    def lines(self, *, ended: bool, most_bytes: int = -1) -> Iterator[str]:
        """Yield the lines of the log that were written since the last call."""
        new, is_copy = self._new(most_bytes)
        taken = new if ended or (len(new) == most_bytes and b"\n" not in new) else new[: new.rfind(b"\n") + 1]
        self.position += -len(taken) if is_copy else len(taken)
        if taken:
            for line in taken.decode(errors="replace").removesuffix("\n").split("\n"):
                # A progress bar overwrites its line after each carriage return.
                yield printable(line.rstrip("\r").rpartition("\r")[2], colours=True)

    def _new(self, most_bytes: int) -> tuple[bytes, bool]:
        """Return the log's bytes after `position`, and whether they come from Ray's copy of the log."""
        try:
            with self._path.open("rb") as file:
                self.position = max(self.position, 0)
                file.seek(self.position)
                return file.read(most_bytes), False
        except FileNotFoundError:
            self.position = min(self.position, 0)
            copy = self._over_http().encode()[-self.position :]
            return copy if most_bytes < 0 else copy[:most_bytes], True


class _Limit:
    """Limit of the size of a log, in which the end of the output that is left out is kept in memory.

    Args:
        size: Bytes that the log has already.
    """

    def __init__(self, size: int) -> None:
        self._left = LIMIT_BYTES - size
        self._left_out = 0
        self._end = bytearray()

    def within(self, output: bytes) -> bytes:
        """Return the part of new output that has to be written."""
        if self._left > 0:
            self._left -= len(output)
            return output if self._left > 0 else output + _NOTICE
        self._left_out += len(output)
        self._end += output
        if len(self._end) > 2 * _TAIL_BYTES:
            del self._end[:-_TAIL_BYTES]
        return b""

    def end(self) -> bytes:
        """Return the end of the output, with a line before it about the output that was left out."""
        # The end begins with a whole line, unless it is the end of a single line.
        is_all = len(self._end) == self._left_out
        end = bytes((not is_all and self._end.partition(b"\n")[2]) or self._end)
        missing = self._left_out - len(end)
        return (f"[{missing:,} bytes of output were left out here]\n".encode() if missing else b"") + end


class _Tee:
    """Text stream that removes the secrets from all text, and writes the text to another stream and to a file.

    Errors in writing, such as a full disk or a closed stream, are ignored, so that a training does not fail because of
    its log.

    Args:
        stream: The other stream.
        file: The file.
        limit: Limit of the output of all streams that are written to the file.
        make_filter: Function that returns a filter. Each thread has its own, because several threads print the lines of
            workers at the same time.
    """

    def __init__(self, stream: TextIO, file: FileIO, limit: _Limit, make_filter: Callable[[], OutputFilter]) -> None:
        self._stream = stream
        self._file = file
        self._limit = limit
        self._make_filter = make_filter
        self._filters: dict[int, OutputFilter] = {}

    def filter_by(self, make_filter: Callable[[], OutputFilter]) -> None:
        """Write the text that the present filters hold back, and use other filters from now on."""
        while self._filters:
            self._write(self._filters.popitem()[1].end())
        self._make_filter = make_filter

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        hidden = self._filters.get(thread) or self._filters.setdefault(thread, self._make_filter())
        self._write(hidden.feed(text))
        return len(text)

    def _write(self, text: str) -> None:
        # A text may contain lone surrogates, which UTF-8 cannot encode; "backslashreplace" writes them as escapes.
        self.put(self._limit.within(text.encode(errors="backslashreplace")))

    def put(self, shown: bytes) -> None:
        """Write bytes to the stream and to the file."""
        if not shown:
            return
        with suppress(OSError, ValueError):
            self._stream.write(shown.decode(errors="replace"))
        with suppress(OSError):
            self._file.write(shown)

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


_open: list[Callable[[], None]] = []


def write_rest() -> None:
    """Write what :func:`teed` holds back in this process, which then ends without the end of the `with` block."""
    for write in _open:
        write()


@contextmanager
def teed(path: Path, make_filter: Callable[[], OutputFilter]) -> Iterator[Callable[[Callable[[], OutputFilter]], None]]:
    """Copy stdout and stderr of this process into a file while the `with` block runs, and remove secrets from all
    output.
    """
    create_folder(path.parent)
    out, err = sys.stdout, sys.stderr
    # FileIO does not buffer. So closing the file writes nothing, and works even if the disk is full.
    with FileIO(path, "a") as file:
        limit = _Limit(file.tell())
        tees = _Tee(out, file, limit, make_filter), _Tee(err, file, limit, make_filter)
        sys.stdout, sys.stderr = tees

        def filter_by(make_filter: Callable[[], OutputFilter]) -> None:
            for tee in tees:
                tee.filter_by(make_filter)

        def end() -> None:
            filter_by(make_filter)
            tees[0].put(limit.end())
            tees[0].flush()

        _open.append(end)
        try:
            yield filter_by
        finally:
            _open.remove(end)
            end()
            sys.stdout, sys.stderr = out, err
