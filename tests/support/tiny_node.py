"""A node that is a few tiny processes under the real supervisor: what Ray does on a bad day, in milliseconds.

``python -m tests.support.tiny_node NODE_ID EPOCH`` is its supervisor. Like a Ray node it has a helper that outlives its
parent (the agents), a process in a session of its own (a job driver), and a listening port.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from shoal.pool import supervisor
from shoal.pool.journal.rows import At, JournalStep
from shoal.pool.spec import PoolSpec
from shoal.state import store
from shoal.state.schema import Node
from tests.support.waiting import wait_until

FAIL_FILE = "refuse-to-start"
"""While a file of this name lies in `$SHOAL_HOME`, no tiny node comes up (its content is the reason)."""

SLOW_FILE = "take-your-time"
"""While a file of this name lies there, tiny nodes do not get any further, and hear nothing."""


DIE_FILE = "die-at"
"""Names a point of a journal step: the first supervisor that comes there dies of SIGKILL."""


def passing(step: JournalStep, at: At) -> None:
    order = Path(os.environ["SHOAL_HOME"]) / DIE_FILE
    if order.exists() and order.read_text() == f"{at} {step}":
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class TinyMember:
    """Three sleeping processes and a port."""

    def __init__(self, node: Node, spec: PoolSpec, gcs: str | None, folder: Path) -> None:
        refuse = Path(os.environ["SHOAL_HOME"]) / FAIL_FILE
        if refuse.exists():
            raise RuntimeError(refuse.read_text())
        wait_until(lambda: not (Path(os.environ["SHOAL_HOME"]) / SLOW_FILE).exists(), "the start", 600)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.set_inheritable(True)
        self._children = [
            subprocess.Popen(["sleep", "1000"], pass_fds=[self._socket.fileno()]),
            subprocess.Popen(["env", "-i", "sleep", "1000"]),  # no tag, like an agent that overwrote it
            subprocess.Popen(["sleep", "1000"], start_new_session=True),  # like a job driver
        ]
        self._busy = Path(os.environ["SHOAL_HOME"]) / f"busy-{node.name}"

    @property
    def endpoint(self) -> dict[str, str]:
        port = self._socket.getsockname()[1]
        return {"gcs": f"127.0.0.1:{port}", "api": f"http://127.0.0.1:{port}", "ray_node_id": "0"}

    def dead(self) -> str | None:
        codes = (child.poll() for child in self._children)
        return next((f"child (exit code {code}) ended by itself" for code in codes if code is not None), None)

    def busy(self) -> bool:
        return self._busy.exists()

    def drain(self, seconds: float, reason: str) -> None:
        pass

    def stop(self) -> None:
        for child in self._children[:1]:
            child.kill()


def main() -> None:
    """Be the supervisor of one."""
    supervisor.ensure_running = lambda: None
    store.passing = passing
    supervisor.main(lambda _: TinyMember)


if __name__ == "__main__":
    main()
