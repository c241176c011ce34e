"""Start the drivers of jobs as processes on a pool's head. A driver is started as a command, or by forking a process
that has already imported the drivers' modules."""

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

from shoal.pool.timeouts import DRIVER_START_TIMEOUT

_FORK_SERVER = "shoal.jobs.driver.fork_server"


class Process(Protocol):
    """Interface of a started process, which leads a process group of its own."""

    @property
    def pid(self) -> int:
        """Return the id of the process."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""


def start_command(command: Sequence[str], folder: Path, log: Path) -> Process:
    """Start a command as a process with a process group of its own.

    Args:
        command: Program and arguments.
        folder: Working folder of the process.
        log: File to which the output of the process is appended.

    Raises:
        OSError: The program cannot be started.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def kill_group(process: Process) -> None:
    """Kill all processes of a process group, unless the group's leader has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _Forked:
    """The process of a driver that was requested from the fork server, and may not have started yet."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._code: int | None = None
        self._changed = threading.Event()

    @property
    def pid(self) -> int:
        """Wait until the driver has started, and return its process id.

        Raises:
            ProcessLookupError: The driver was not started in time.
        """
        self._changed.wait(DRIVER_START_TIMEOUT)
        if self._pid is None:
            raise ProcessLookupError(f"the fork server did not start the driver within {DRIVER_START_TIMEOUT:.0f} s")
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
    """Handle of a fork server: a process that forks itself for each driver (see `shoal.jobs.driver.fork_server`).

    The constructor starts the fork server, so that its imports are done before the first job is submitted.
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
        """Return whether the fork server runs, and no package was installed or removed since its start."""
        return self._process.poll() is None and self._stamp == _installed()

    def is_busy(self) -> bool:
        """Return whether any driver that this fork server has started still runs."""
        return bool(self._drivers)

    def start(self, key: str, arguments: Sequence[str], folder: Path, log: Path) -> Process:
        """Let the fork server start a driver.

        Args:
            key: Unique name of the driver.
            arguments: Command line arguments of the driver.
            folder: Working folder of the driver.
            log: File to which the driver's output is appended.

        Raises:
            OSError: The fork server has ended.
        """
        assert self._process.stdin is not None
        driver = self._drivers[key] = _Forked()
        request = {"id": key, "arguments": list(arguments), "folder": str(folder), "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return driver

    def close(self) -> None:
        """End the fork server and all drivers that it has started."""
        self._process.kill()  # closed pipes would end the process only after it has finished an import

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
        # When the fork server ends, the kernel kills its drivers.
        for driver in self._drivers.values():
            driver.ended(-signal.SIGKILL)


def _installed() -> list[int]:
    """Return a value that changes when packages are installed or removed in the environment of this process."""
    folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return [os.stat(folder).st_mtime_ns for folder in sorted(folders)]
