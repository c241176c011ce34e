"""Start drivers in milliseconds: fork, for each job, a process that has already imported the modules of a driver.

A pool's head starts this process (``python -P -m shoal.jobs.driver.fork_server``) and writes a request for each job to
its stdin, as a line of JSON. The answers on its stdout are lines of JSON, too: one when a driver has started, one when
it has ended. The process has one thread and runs no code of a job, and each fork of it serves one job. The drivers end
with the process that forked them, and that process ends with the head.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import sys
from typing import Any, NoReturn

from shoal.jobs.driver import main as driver

_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Server that forks the drivers, with its pipes and the drivers that run."""

    def __init__(self) -> None:
        # The answers have a descriptor of their own, so that texts that a library prints do not mix with the answers.
        self._answers = os.dup(1)
        os.dup2(2, 1)
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._running: dict[int, str] = {}

    def serve(self) -> None:
        """Start drivers, and report their ends, until stdin is closed."""
        # Without `gc.freeze`, the garbage collection of a driver would copy the memory that it shares with this
        # process.
        gc.freeze()
        requests = b""
        with selectors.DefaultSelector() as selector:
            for descriptor in (0, self._woken):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    read = os.read(key.fd, 65536)
                    if key.fd != 0:
                        self._report_ends()
                    elif not read:
                        return
                    else:
                        *lines, requests = (requests + read).split(b"\n")
                        for line in lines:
                            self._start(json.loads(line))

    def _start(self, request: dict[str, Any]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_driver(server, request)
        self._running[pid] = request["id"]
        self._answer({"id": request["id"], "pid": pid})

    def _become_driver(self, server: int, request: dict[str, Any]) -> NoReturn:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.close(self._answers)
            os.chdir(request["folder"])
            for descriptor, path, flags in (
                (0, os.devnull, os.O_RDONLY),
                (1, request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT),
            ):
                os.dup2(os.open(path, flags, 0o600), descriptor)
            os.dup2(1, 2)
            sys.argv = ["shoal.jobs.driver", *request["arguments"]]
            driver.run_and_exit()
        finally:
            os._exit(1)

    def _report_ends(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._answer({"id": self._running.pop(pid), "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, answer: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    ForkServer().serve()
    os._exit(0)
