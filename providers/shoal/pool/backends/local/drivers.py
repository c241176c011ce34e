"""The drivers of jobs as processes of a head: started as commands, or by a fork server that has done their imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

_FORK_SERVER = "shoal.jobs.driver.fork_server"

_START_S = 60.0
"""Seconds to wait until the fork server has started a driver. It needs 1 s for its imports, and more on a busy host."""


class Process(Protocol):
    """A process that leads a process group of its own."""

    @property
    def pid(self) -> int:
        """Id of the process."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""


def start_command(command: Sequence[str], folder: Path, log: Path) -> Process:
    """Start a command.

    Args:
        command: Program and arguments.
        folder: Its working folder.
        log: File to which its output is appended.

    Raises:
        OSError: The program cannot be started.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def kill_group(process: Process) -> None:
    """Kill all processes of a process group, unless its leader has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Forked:
    """A driver that the fork server has started, or will start soon."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._code: int | None = None
        self._changed = threading.Event()

    @property
    def pid(self) -> int:
        """Process id of the driver. Wait until it has started.

        Raises:
            ProcessLookupError: The driver was not started.
        """
        self._changed.wait(_START_S)
        if self._pid is None:
            raise ProcessLookupError("the driver was not started")
        return self._pid

    def poll(self) -> int | None:
        return self._code

    def started(self, pid: int) -> None:
        self._pid = pid
        self._changed.set()

    def ended(self, code: int) -> None:
        self._code = code
        self._changed.set()


class ForkServer:
    """Handle of the process that forks itself for each driver, see `shoal.jobs.driver.fork_server`.

    The process is started with this object, so that it has done its imports when the first job comes.
    """

    def __init__(self) -> None:
        self._drivers: dict[str, _Forked] = {}
        self._stamp = _installed()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _FORK_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(target=self._read, name="shoal-fork-server", daemon=True).start()

    def is_current(self) -> bool:
        """Return whether the process runs, and no package was installed or removed since it has done its imports."""
        return self._process.poll() is None and self._stamp == _installed()

    def is_busy(self) -> bool:
        """Return whether a driver runs that this process has started."""
        return bool(self._drivers)

    def start(self, key: str, arguments: Sequence[str], folder: Path, log: Path) -> Process:
        """Start a driver.

        Args:
            key: Distinguishes the drivers.
            arguments: Command line arguments of the driver.
            folder: Its working folder.
            log: File to which its output is appended.

        Raises:
            OSError: The process has ended.
        """
        assert self._process.stdin is not None
        driver = self._drivers[key] = _Forked()
        request = {"id": key, "arguments": list(arguments), "folder": str(folder), "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return driver

    def close(self) -> None:
        """End the process and its drivers."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            driver = self._drivers[answer["id"]]
            if "pid" in answer:
                driver.started(answer["pid"])
            else:
                driver.ended(answer["code"])
                del self._drivers[answer["id"]]
        self._process.wait()
        # The drivers end with the fork server.
        for driver in self._drivers.values():
            driver.ended(-signal.SIGKILL)


def _installed() -> list[int]:
    """Return a value that changes when packages are installed or removed in the environment of this process."""
    folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return [os.stat(folder).st_mtime_ns for folder in sorted(folders)]
