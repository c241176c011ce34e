"""A node that is a few tiny processes under the real supervisor: what Ray does on a bad day, in milliseconds.

``python -m tests.pool.tiny NODE_ID EPOCH`` is its supervisor. Like a Ray node it has a helper that outlives its parent
(the agents), a process in a session of its own (a job driver), and a listening port.
"""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from shoal.pool.spec import PoolSpec
from shoal.pool.supervisor import main
from shoal.state.schema import Node

FAIL_FILE = "refuse-to-start"
"""While a file of this name lies in `$SHOAL_HOME`, no tiny node comes up (its content is the reason)."""


class TinyMember:
    """Three sleeping processes and a port."""

    def __init__(self, node: Node, spec: PoolSpec, gcs: str | None, folder: Path) -> None:
        refuse = Path(os.environ["SHOAL_HOME"]) / FAIL_FILE
        if refuse.exists():
            raise RuntimeError(refuse.read_text())
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
        return next(
            (f"child (exit code {child.returncode})" for child in self._children if child.poll() is not None), None
        )

    def busy(self) -> bool:
        return self._busy.exists()

    def drain(self, seconds: float, reason: str) -> None:
        pass

    def stop(self) -> None:
        for child in self._children[:1]:
            child.kill()


if __name__ == "__main__":
    main(TinyMember)
