"""Hide secrets in all that a process writes to the file descriptors 1 and 2, also through C libraries and subprocesses.

The process writes into pipes, and a second process reads the pipes and writes the text without secrets to the files or
terminals where the output went before. The reader is no thread, because a library may write while it holds Python's
interpreter lock, and would then wait for ever as soon as a pipe is full. It survives the process whose output it reads,
so that the last lines before a crash are not lost.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

from shoal.os_processes import start_python
from shoal.secrets.known_secrets import KnownSecrets, SecretStream
from shoal.secrets.redaction import redact

SECRETS = "SHOAL_SECRETS"
"""Name under which the driver passes the secrets to its workers, as a list in JSON, together with the variables for the
workers' environment. The workers do not set this variable."""

DRIVER_TAG = "SHOAL_DRIVER_PID"
"""Variable by which the fork server of a head recognizes the processes of a driver, which it kills when the driver has
ended. The reader does not inherit the variable, because it ends only after it has written the last output."""

_PATIENCE_S = 0.2
"""Seconds to wait for the rest of a line. Credentials in a URL are recognized only in a whole line."""

_LONGEST_LINE = 8192
"""Number of characters of a line after which the reader does not wait for the rest of the line."""

_END_S = 2.0
"""Longest time in seconds to wait at the end until the reader has written all output. A subprocess that goes on running
keeps the pipes open, so the wait must be limited."""

_OUTPUTS = (1, 2)

_START = (
    # The reader is no child of this process: Ray kills the children of a worker together with the worker.
    "import os; os.fork() and os._exit(0); "
    "from shoal.secrets.hidden_output import read_pipes; import sys; read_pipes(*map(int, sys.argv[1:]))"
)


def hide_output(secrets: Iterable[str]) -> int:
    """Hide secrets in the output of this process and of its later subprocesses, until the process ends."""
    with contextlib.ExitStack() as stack:

        def ours(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        handed = ours(os.memfd_create("shoal-secrets"))
        os.write(handed, json.dumps(list(secrets)).encode())
        ended, done = os.pipe()
        on_error = stack.enter_context(contextlib.ExitStack())
        on_error.callback(os.close, ended)
        passed, writes = [handed, ours(done)], []
        for output in _OUTPUTS:
            read, write = os.pipe()
            writes.append(ours(write))
            passed += [ours(read), ours(os.dup(output))]
        reader = start_python(
            ["-c", _START, *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            environment={name: value for name, value in os.environ.items() if name != DRIVER_TAG},
        )
        if code := reader.wait():
            raise subprocess.CalledProcessError(code, reader.args)
        flush_output()
        for output, write in zip(_OUTPUTS, writes, strict=True):
            os.dup2(write, output)
        on_error.pop_all()
    return ended


@contextlib.contextmanager
def hidden_output(secrets: Iterable[str]) -> Iterator[None]:
    """Hide secrets in the output of this process and of its subprocesses while the ``with`` block runs.

    Without secrets, nothing is done.
    """
    values = list(secrets)
    if not values:
        yield
        return
    before = [os.dup(output) for output in _OUTPUTS]
    ended: int | None = None
    try:
        ended = hide_output(values)
        yield
    finally:
        flush_output()
        for output, original in zip(_OUTPUTS, before, strict=True):
            os.dup2(original, output)
            os.close(original)
        if ended is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                selector.select(_END_S)
            os.close(ended)


def read_pipes(secrets: int, done: int, *descriptors: int) -> None:
    """Copy the output of another process without secrets, until all its writers have ended."""
    os.lseek(secrets, 0, os.SEEK_SET)
    with os.fdopen(secrets, "rb") as file:
        known = KnownSecrets(json.load(file))
    outputs = {read: _Output(known, write) for read, write in zip(descriptors[::2], descriptors[1::2], strict=True)}
    with selectors.DefaultSelector() as selector:
        for read in outputs:
            selector.register(read, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(_PATIENCE_S if any(output.is_waiting for output in outputs.values()) else None)
            for key, _ in ready:
                if chunk := os.read(key.fd, 65536):
                    outputs[key.fd].feed(chunk)
                else:
                    outputs[key.fd].end()
                    selector.unregister(key.fd)
            for output in outputs.values():
                output.look()
    os.close(done)


class _Output:
    """One output of the other process.

    Args:
        known: The secrets.
        descriptor: File descriptor to write to.
    """

    def __init__(self, known: KnownSecrets, descriptor: int) -> None:
        self._stream = SecretStream(known)
        self._descriptor = descriptor
        # "surrogateescape" keeps bytes that are no UTF-8 as they are.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._line = ""
        self._since = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the beginning of a line waits for its end."""
        return bool(self._line)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, and write all complete lines."""
        lines, at, self._line = (self._line + self._decoder.decode(chunk)).rpartition("\n")
        self._since = time.monotonic()
        self._write(self._stream.feed(lines + at))
        if len(self._line) > _LONGEST_LINE:
            self._write_line()

    def look(self) -> None:
        """Write the beginning of a line that has waited long enough for its end, such as that of a progress bar."""
        if self._line and time.monotonic() - self._since >= _PATIENCE_S:
            self._write_line()

    def end(self) -> None:
        """Write the rest."""
        self._line += self._decoder.decode(b"", final=True)
        self._write(self._stream.feed(self._line) + self._stream.end())
        self._line = ""

    def _write_line(self) -> None:
        self._write(self._stream.feed(self._line))
        self._line = ""

    def _write(self, text: str) -> None:
        content = redact(text).encode(errors="surrogateescape")
        # If the disk is full or the terminal is closed, the text is lost, as it would be without this process. The
        # other process must not wait for ever, so its output is read further.
        with contextlib.suppress(OSError):
            while content:
                content = content[os.write(self._descriptor, content) :]


def flush_output() -> None:
    """Write what Python still holds of the output of this process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
