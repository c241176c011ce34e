"""The processes of a control plane: how one starts, and how it ends for certain."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import ROOT
from tests.support.waiting import wait_until


@dataclass
class Service:
    """A process of ours that runs until it is stopped; it ends with this process in any case."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again if it was stopped."""
        # The signal comes when the thread ends that has started the process: fixtures run in the main thread.
        command = ["setpriv", "--pdeathsig", "KILL", *self.command]
        environment = os.environ | self.environment
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        """Wait until it does its work.

        Raises:
            RuntimeError: it has ended; the message has the end of its log.
        """

        def ready() -> bool:
            if (code := self.process.poll()) is not None:
                end = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{self.name} has ended with {code}. The end of its log:\n{end}")
            return condition()

        wait_until(ready, f"{self.name} to be ready; its log is {self.log}", seconds=seconds)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that runs now, or ran last."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    def stop(self, grace: float = 15) -> None:
        """Stop it, and wait for its end."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        self.thaw()  # a process that stands still hears of nothing
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it with everything that it has started, as when a machine loses its power."""
        if self._process is None:
            return
        below: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        # Containers end with their agent, but a moment later.
        _, left = psutil.wait_procs(below, timeout=5)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)

    def freeze(self) -> None:
        """Let it stand still, as when a machine hangs."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that no process uses now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def agent_command(settings: Path) -> list[str]:
    """The command of a node agent, whose mounts are gone when its last process is."""
    alone = ["unshare", "--mount", "--propagation", "slave"]
    return [*alone, sys.executable, "-m", "tests.kuberay.agent", str(settings)]
