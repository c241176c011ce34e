"""Start the drivers of jobs as processes on a pool's head. A driver is started as a command, or by forking a process
that has already imported the drivers' modules."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from shoal.os_processes import how_ended, python_command
from shoal.pool.timeouts import DRIVER_START_TIMEOUT

_FORK_SERVER = "shoal.jobs.driver.fork_server"


class Process(Protocol):
    """Interface of a started process, which leads a process group of its own."""

    @property
    def pid(self) -> int:
        """Return the id of the process."""

    @property
    def start_error(self) -> str:
        """Return why the process could not be started; empty if it was started."""

    @property
    def why_ended(self) -> str:
        """Return why the process was killed; empty if this is not known."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""


class _Command(subprocess.Popen[bytes]):
    start_error = why_ended = ""


def start_command(command: Sequence[str], folder: Path, log: Path) -> Process:
    """Start a command as a process with a process group of its own."""
    try:
        with log.open("ab") as output:
            return _Command(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        process = _RequestedProcess()
        process.refused(str(error))
        return process


def kill_group(process: Process) -> None:
    """Kill all processes of a process group, unless the group's leader has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class _ChildProcess:
    """A forked child process, with the methods of `subprocess.Popen` that this module uses."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._has_ended = False

    def kill(self) -> None:
        # After `waitpid`, the kernel may give the process id to another process.
        with self._lock:
            if not self._has_ended:
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._has_ended = True
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _start_fork_server(requests: int, answers: int) -> subprocess.Popen[bytes] | _ChildProcess:
    """Start the program of the fork server in a session of its own.

    If this process has only one thread and has not imported Ray, the fork server is a fork of it. Then the two share
    the memory of the modules that both use (30 MiB), and the start takes 0.2 s of CPU time instead of 0.6 s. After a
    fork, Ray would write to the streams of this process, also in the drivers.
    """
    if len(os.listdir("/proc/self/task")) > 1 or "ray" in sys.modules:
        command = python_command("-m", _FORK_SERVER)
        return subprocess.Popen(command, stdin=requests, stdout=answers, start_new_session=True)
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(requests, 0)
            os.dup2(answers, 1)
            # Close the child's copies of this process's descriptors. They would keep files locked and sockets open.
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            sys.argv = [_FORK_SERVER]
            runpy.run_module(_FORK_SERVER, run_name="__main__")
        finally:
            os._exit(1)
    return _ChildProcess(pid)


class _RequestedProcess:
    """A process that was requested from the fork server. It may not have started yet."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._code: int | None = None
        self._start_error = self._why_ended = ""
        self._changed = threading.Event()

    @property
    def pid(self) -> int:
        """Wait until the process has started, and return its process id.

        Raises:
            ProcessLookupError: The process was not started, or not in time.
        """
        self._changed.wait(DRIVER_START_TIMEOUT)
        if self._pid is None:
            why = self._start_error or f"the fork server did not start it within {DRIVER_START_TIMEOUT:.0f} s"
            raise ProcessLookupError(f"there is no process: {why}")
        return self._pid

    @property
    def start_error(self) -> str:
        return self._start_error

    @property
    def why_ended(self) -> str:
        return self._why_ended

    def poll(self) -> int | None:
        return self._code

    def started(self, pid: int) -> None:
        self._pid = pid
        self._changed.set()

    def ended(self, code: int, why: str = "") -> None:
        self._why_ended = why
        self._code = code
        self._changed.set()

    def refused(self, reason: str) -> None:
        self._start_error = f"the head cannot start another process: {reason}"
        self.ended(1)


class ForkServer:
    """Handle of a fork server: a process that forks itself for each driver (see `shoal.jobs.driver.fork_server`).

    The constructor starts the fork server, so that its imports are done before the first job is submitted.

    Args:
        libraries: Libraries that are imported before the first job. With MLflow's stores, shoal's own MLflow database
            is created, too, if there is none.
    """

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self._drivers: dict[str, _RequestedProcess] = {}
        self._stamp = _package_folder_times()
        self._has_ended = False
        requests, request_to = os.pipe()
        answers_from, answers = os.pipe()
        self._requests, self._answers = os.fdopen(request_to, "wb", buffering=0), os.fdopen(answers_from, "rb")
        try:
            self._process = _start_fork_server(requests, answers)
        finally:
            os.close(requests)
            os.close(answers)
        threading.Thread(target=self._read, name="shoal-fork-server", daemon=True).start()
        # If the fork server has ended already, the first request for a driver finds out.
        with suppress(OSError):
            self._ask({"libraries": list(libraries)})

    def is_current(self) -> bool:
        """Return whether the fork server runs, and no package was installed or removed since its start."""
        return not self._has_ended and self._stamp == _package_folder_times()

    def is_busy(self) -> bool:
        """Return whether any driver that this fork server has started still runs."""
        return bool(self._drivers)

    def start(self, key: str, arguments: Sequence[str], libraries: Sequence[str], folder: Path, log: Path) -> Process:
        """Let the fork server import the libraries that it has not imported yet, and start a driver.

        Raises:
            OSError: The fork server has ended.
        """
        driver = self._drivers[key] = _RequestedProcess()
        what = {"id": key, "arguments": list(arguments), "libraries": list(libraries)}
        self._ask({**what, "folder": str(folder), "log": str(log)})
        return driver

    def close(self) -> None:
        """End the fork server and all drivers that it has started."""
        # Kill the fork server instead of closing its pipes, because it may be importing modules, and would notice the
        # closed pipes only after the import.
        self._process.kill()

    def _ask(self, request: dict[str, Any]) -> None:
        self._requests.write(json.dumps(request).encode() + b"\n")

    def _read(self) -> None:
        with self._requests, self._answers:
            for line in self._answers:
                answer: dict[str, Any] = json.loads(line)
                driver = self._drivers[answer["id"]]
                if "pid" in answer:
                    driver.started(answer["pid"])
                    continue
                if "refused" in answer:
                    driver.refused(answer["refused"])
                else:
                    driver.ended(answer["code"], answer["why"])
                del self._drivers[answer["id"]]
        self._has_ended = True
        # When the fork server ends, the kernel kills its drivers. So -SIGKILL is recorded as their exit code.
        why = f"the process that forks the drivers of the head {how_ended(self._process.wait())}"
        for driver in self._drivers.values():
            driver.ended(-signal.SIGKILL, why)


def _package_folder_times() -> list[int]:
    """Return the modification times of the folders of installed packages. They change when a package is installed or
    removed."""
    folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return [os.stat(folder).st_mtime_ns for folder in sorted(folders)]
