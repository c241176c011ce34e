"""Nodes on this machine: one detached supervisor process each, which owns a Ray node on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.pool import processes
from shoal.pool.backends.base import NodeRef
from shoal.pool.processes import NODE_TAG, ProcessId
from shoal.pool.tunables import KILL_PATIENCE, TERMINATE_PATIENCE
from shoal.state.home import ROOT_VARIABLE, home, runtime_root, subfolder

_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CUDA_VISIBLE_DEVICES", "SHOAL_STATE_URL",
)  # fmt: skip
"""All that a node takes over from whoever happens to start it: a task's secrets do not become the pool's."""

_SUPERVISOR = "shoal.pool.supervisor"


class LocalBackend:
    """The embedded default. Needs no service, and works for the user and host it was made by."""

    def __init__(self, supervisor_module: str = _SUPERVISOR) -> None:
        self._module = supervisor_module

    def start(self, node: NodeRef) -> None:
        """Spawn the node's supervisor, which claims the row or goes away again."""
        processes.spawn_detached(
            [sys.executable, "-m", self._module, node.id, str(node.epoch)],
            env=node_environment(node),
            log=log_path(node.pool, node.name),
        )

    def lost(self, node: NodeRef) -> str | None:
        """A local node is what its supervisor is."""
        if node.supervisor is None or node.supervisor.alive():
            return None
        return f"its supervisor (pid {node.supervisor.pid}) is gone"

    def end(self, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Ask the supervisors, then kill whatever is left, then remove the folders."""
        for node in nodes:
            if node.supervisor:
                node.supervisor.signal(signal.SIGTERM)
        until = time.monotonic() + TERMINATE_PATIENCE
        while time.monotonic() < until and any(node.supervisor and node.supervisor.alive() for node in nodes):
            time.sleep(0.05)  # a supervisor takes its node down in 0.3 to 2 s
        return {node.id: self._end_rest(node) for node in nodes}

    def _end_rest(self, node: NodeRef) -> str | None:
        folder = node_folder(node.id)

        def find() -> list[ProcessId]:
            found = processes.of_node(node.id, folder, node.supervisor)
            return [*found, node.supervisor] if node.supervisor and node.supervisor.alive() else found

        if stuck := processes.end_all(find, patience=KILL_PATIENCE):
            return f"processes {', '.join(str(process.pid) for process in stuck)} do not end"
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # the last node of this home takes the root along
        return f"{folder} cannot be removed" if folder.exists() else None

    def existing(self) -> list[str]:
        """The folders under this home's runtime root."""
        root = runtime_root()
        return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.exists() else []


def node_folder(node_id: str) -> Path:
    """Where a node keeps its sockets, logs and spilled objects while it lives."""
    return runtime_root() / node_id


def log_path(pool: str, name: str) -> Path:
    """Where a node's supervisor writes what it has to say."""
    return subfolder("pools", pool, "logs") / f"{name}.log"


def token_path(pool: str) -> Path:
    """The pool's bearer token: a 0600 file, made by `up()` and removed by `down()`."""
    return subfolder("pools", pool) / "token"


def inherited_environment() -> dict[str, str]:
    """What detached processes take over from their starter's environment."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**kept, "SHOAL_HOME": str(home()), ROOT_VARIABLE: str(runtime_root()), "PYTHONUNBUFFERED": "1"}


def node_environment(node: NodeRef) -> dict[str, str]:
    """A node's whole environment."""
    return {
        **inherited_environment(),
        NODE_TAG: node.id,
        "SHOAL_PYTHON": sys.executable,  # what a job's entry point runs; the submitter may live in another environment
        "SHOAL_POOL": node.pool,
        # Ray's dashboard leaves folders in the temp dir when it is killed: they go with the node's folder.
        "TMPDIR": str(node_folder(node.id)),
        **ray_environment(token_path(node.pool)),
    }


def ray_environment(token: Path) -> dict[str, str]:
    """What every Ray process of a local pool, and every driver that connects to one, needs in its environment.

    Read by Ray when it is imported, so it has to be there before.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Without it `ray.init("127.0.0.1:…")` is rewritten to the host's address, where nothing listens.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A killed raylet is declared dead after 5 missed checks: 5 s instead of 15.
        "RAY_health_check_period_ms": "1000",
    }
