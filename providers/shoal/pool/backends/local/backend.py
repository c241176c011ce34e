"""Nodes on this machine: one detached supervisor process each, which owns a Ray node on loopback."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import StoreError
from shoal.pool.backends.base import NodeRef, PoolRef, Seen
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.endpoint import Endpoint, ray_environment
from shoal.pool.spec import PoolSpec
from shoal.pool.tunables import KILL_PATIENCE, START_TIMEOUT, TERMINATE_PATIENCE
from shoal.state.home import home, subfolder
from shoal.state.private import remove_folder
from shoal.state.process import ProcessId
from shoal.state.runtime import (
    ROOT_VARIABLE,
    node_folders,
    node_ids,
    remove_node_folders,
    runtime_root,
    temp_folder,
)

_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CUDA_VISIBLE_DEVICES", "SHOAL_STATE_URL",
)  # fmt: skip
"""All that a node takes over from whoever happens to start it: a task's secrets do not become the pool's."""

_SUPERVISOR = "shoal.pool.supervisor"

_START_TIMEOUT_PER_NODE = 10.0
"""A host starts a few nodes at once (3 to 9 s each here), so each may wait for those before it."""


class LocalBackend:
    """The embedded default. Needs no service, and works for the user and host it was made by."""

    def __init__(self, supervisor_module: str = _SUPERVISOR) -> None:
        self._module = supervisor_module

    bound_to_host = True
    start_timeout = START_TIMEOUT
    start_timeout_per_node = _START_TIMEOUT_PER_NODE

    def admit(self, spec: PoolSpec, size: int) -> None:
        """Any size up to MAX_NODES: whether the machine carries it shows as the nodes start.

        Raises:
            StoreError: The temp folder cannot take the nodes' sockets.
        """
        runtime_root()

    def prepare(self, spec: PoolSpec) -> None:
        """A new token: one of an earlier life opens nothing any more."""
        path = token_path(spec.name)
        try:
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written: {error}. Free some room, or set SHOAL_HOME elsewhere"
            ) from error

    def discard(self, name: str, *, everything: bool) -> None:
        """The token; with `everything` the pool's folder."""
        token_path(name).unlink(missing_ok=True)
        if everything:
            remove_folder(token_path(name).parent)

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        """A local node is what its supervisor is."""
        return Seen(
            lost={
                node.id: f"its supervisor (pid {node.supervisor.pid}) is gone"
                for node in nodes
                if node.supervisor and not node.supervisor.alive()
            }
        )

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        """Spawn the nodes' supervisors, which claim their rows or go away again."""
        for node in nodes:
            processes.spawn_detached(
                [sys.executable, "-m", self._module, node.id, str(node.epoch)],
                env=node_environment(node),
                log=log_path(node.pool, node.name),
            )

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Ask the supervisors, then kill whatever is left, then remove the folders."""
        for node in nodes:
            if node.supervisor:
                node.supervisor.signal(signal.SIGTERM)
        until = time.monotonic() + TERMINATE_PATIENCE
        while time.monotonic() < until and any(node.supervisor and node.supervisor.alive() for node in nodes):
            time.sleep(0.05)  # a supervisor takes its node down in 0.3 to 2 s
        return {node.id: self._end_rest(node) for node in nodes}

    def existing(self) -> list[str]:
        """The nodes' folders in the runtime roots of this home and store."""
        return node_ids()

    def clear(self, node_id: str) -> str | None:
        """By its folder and tag, which is all that is known of it."""
        return self._end_rest(NodeRef(node_id, node_id, "", 0, None))

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """The head's own, with the pool's token."""
        return Endpoint(head["api"], head["gcs"], token_path(spec.name))

    def log(self, node: NodeRef) -> str:
        """The supervisor's log on this host."""
        return str(log_path(node.pool, node.name))

    def _end_rest(self, node: NodeRef) -> str | None:
        folders = node_folders(node.id)

        def find() -> list[ProcessId]:
            found = processes.of_node(node.id, folders, node.supervisor)
            return [*found, node.supervisor] if node.supervisor and node.supervisor.alive() else found

        if stuck := processes.end_all(find, patience=KILL_PATIENCE):
            return f"processes {', '.join(str(process.pid) for process in stuck)} do not end"
        return remove_node_folders(node.id)


def node_folder(node_id: str) -> Path:
    """Where a new node keeps its sockets, logs and spilled objects while it lives."""
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
    if NODE_TAG in os.environ:
        kept["TMPDIR"] = str(temp_folder())  # a node's own goes with the node
    return {**kept, "SHOAL_HOME": str(home()), "PYTHONUNBUFFERED": "1"}


def node_environment(node: NodeRef) -> dict[str, str]:
    """A node's whole environment."""
    return {
        **inherited_environment(),
        NODE_TAG: node.id,
        ROOT_VARIABLE: str(runtime_root()),
        "SHOAL_PYTHON": sys.executable,  # what a job's entry point runs; the submitter may live in another environment
        "SHOAL_POOL": node.pool,
        # Ray's dashboard leaves folders in the temp dir when it is killed: they go with the node's folder.
        "TMPDIR": str(node_folder(node.id)),
        **ray_environment(token_path(node.pool)),
    }
