"""Supervisors of tiny nodes without their second of imports: forked from one process that has done them.

``python -m tests.support.fork_server SOCKET`` is that process. What it forks cannot be told from
``python -m tests.support.tiny_node NODE_ID EPOCH`` started anew: a child of init that leads its own session, with the
environment (in `/proc` too) and the log that were asked for. Only its command line is the server's.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support import ROOT, tiny_node

ADDRESS = "SHOAL_TEST_FORK_SERVER"
"""The variable that names the server's socket to those who want a supervisor."""

_ROOM = 32_768
"""Bytes for the environment of a supervisor, which is written over the server's own."""


@contextmanager
def running() -> Iterator[str]:
    """A server for the duration; its address."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-forks-") as folder:
        address = f"{folder}/socket"
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", address],
            cwd=ROOT,
            env={**os.environ, "ROOM_FOR_THE_ENVIRONMENT": "x" * _ROOM},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield address
        server.terminate()
        server.wait()


def spawn(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
    """Have a supervisor forked, as `shoal.pool.backends.local.processes.spawn_detached` would start it.

    Args:
        argv: Its arguments: the node and the epoch.
        env: Its whole environment.
        log: File that its standard output and error are appended to.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        connection.sendall(json.dumps({"argv": list(argv), "env": dict(env), "log": str(log)}).encode() + b"\n")
        assert connection.recv(16) == b"forked"


def _serve(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                asked = json.loads(connection.makefile().readline())
                if (between := os.fork()) == 0:
                    if os.fork():
                        os._exit(0)  # so that the supervisor is a child of init
                    listener.close()
                    connection.close()
                    _become(**asked)
                os.waitpid(between, 0)
                connection.sendall(b"forked")


def _become(argv: list[str], env: dict[str, str], log: str) -> None:
    try:
        os.setsid()
        for target, file, how in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
            opened = os.open(file, how, 0o644)
            os.dup2(opened, target)
            os.close(opened)
        os.dup2(1, 2)
        os.environ.clear()
        os.environ.update(env)  # as copies: nothing points to the memory of the first ones any more
        _show_environment(env)
        sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))  # as Python does when it starts
        sys.argv = [sys.argv[0], *argv]
        tiny_node.main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _show_environment(env: Mapping[str, str]) -> None:
    """Write an environment where the kernel looks for it: nodes are found by a tag in theirs."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    shown = b"".join(f"{name}={value}\0".encode() for name, value in env.items())
    assert len(shown) < end - start, f"an environment of {len(shown)} bytes, and room for {end - start}"
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _serve(sys.argv[1])
