"""Start and end nodes on this machine. Each node is owned by a detached supervisor process.

Without bytecode of the installed packages, a node takes many seconds longer to start: installers such as uv do not
compile packages, and a variable or a read-only folder may prevent that Python does.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from shoal import telemetry
from shoal.errors import InvalidArgumentError, MissingExtraError
from shoal.installation import pip_install
from shoal.os_processes import ProcessId, has_proc, import_folders, python_command
from shoal.pool.backends import versions
from shoal.pool.backends.interface import Backend, NodeRef, PoolRef, Seen
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.gpus import SELECTORS, check_number
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.backends.ray_http import last_line
from shoal.pool.endpoint import Endpoint, ray_environment
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import KILL_PATIENCE, START_TIMEOUT, START_TIMEOUT_PER_NODE, TERMINATE_PATIENCE
from shoal.state import private_folders
from shoal.state.home import home, subfolder, write_file

_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH",
    "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "SHOAL_STATE_URL", "UV_CONFIG_FILE", *SELECTORS,
)  # fmt: skip
"""The only environment variables that a node inherits from the process that starts the node. So the secrets of an
Airflow or Prefect task do not reach the pool. PYTHONDONTWRITEBYTECODE is not inherited, because each start of a node
would compile all packages that are not compiled yet."""


def require_linux() -> None:
    """Check that this host can run nodes.

    Raises:
        InvalidArgumentError: The host has no /proc.
    """
    if not has_proc():
        raise InvalidArgumentError(
            "local:// pools and embedded pools need Linux, because shoal reads the states of their processes in /proc: "
            "use a ray:// pool"
        )


def inherited_environment() -> dict[str, str]:
    """Return the environment variables for a detached process: the variables of this process that are in `_INHERITED`,
    the settings of OpenTelemetry without credentials, and SHOAL_HOME."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    if "PYTHONPATH" in kept:
        kept["PYTHONPATH"] = os.pathsep.join(import_folders(kept["PYTHONPATH"]))
    if NODE_TAG in os.environ:
        # This process belongs to a node, so its TMPDIR is the node's folder, which is removed when the node ends. The
        # detached process may run longer than the node, so its TMPDIR is the host's temp folder.
        kept["TMPDIR"] = str(private_folders.temp_folder())
    if "PYTHONPYCACHEPREFIX" not in kept and not all(map(can_be_written, sources_without_bytecode())):
        kept["PYTHONPYCACHEPREFIX"] = str(subfolder("bytecode"))
    return {**kept, **telemetry.settings(), "SHOAL_HOME": str(home()), "PYTHONUNBUFFERED": "1"}


class LocalBackend(Backend):
    """The default backend, which runs nodes on this machine. No service has to be installed. Only the user and the host
    that started a pool can use the pool."""

    supervisor = "shoal.pool.supervisor"
    """Module with which the supervisor process of a node is started (``python -m``)."""
    bound_to_host = shares_files = can_retire = has_exact_nodes = answers_at_once = True
    is_checked = False
    start_timeout = START_TIMEOUT
    start_timeout_per_node = START_TIMEOUT_PER_NODE

    def admit(self, spec: PoolSpec, size: int) -> None:
        """Check that this host can run nodes: it has /proc, Ray, a folder for the nodes' sockets, and the nodes' GPUs.

        Raises:
            MissingExtraError: Ray is not installed in this environment, in which the nodes would start.
            StoreError: The temp folder cannot hold the nodes' sockets.
            InvalidArgumentError: The host has no /proc, the pool's own interpreter cannot be used, or the nodes need
                more GPUs than the process that started the pool can use.
        """
        require_linux()
        if spec.python is not None:
            _check_python(spec.python, needs_ray=spec.ray)
        elif spec.ray:
            self.check_ray()
        private_folders.runtime_root()
        if spec.gpus_per_node > 0:
            selectors = _selectors(spec.name)
            check_number(spec.gpus_per_node, size, os.environ if selectors is None else selectors)

    def check_ray(self) -> None:
        """Check that Ray is installed, and warn if shoal was not tested with the installed version of Ray.

        Raises:
            MissingExtraError: Ray is not installed in this environment.
        """
        if find_spec("ray") is None:
            raise MissingExtraError(
                "ray",
                "ray",
                "use a pool whose nodes need no Ray in this environment: a local pool with python= or ray=false, a "
                "ray:// pool, or, for a job without a lease, a local pool that is up",
            )
        if (warning := versions.untested_ray()) is not None:
            warnings.warn(warning, stacklevel=3)

    def prepare(self, spec: PoolSpec) -> None:
        """Create a new bearer token for a pool that is about to start. Tokens from earlier starts are then no longer
        valid.

        Also record which GPUs this process may use. All nodes of the pool are limited to these GPUs, even if another
        process starts them.
        """
        write_file(token_path(spec.name), secrets.token_hex(32))
        selectors = {name: os.environ[name] for name in SELECTORS if name in os.environ}
        write_file(_selectors_path(spec.name), json.dumps(selectors))

    def discard(self, name: str, *, everything: bool) -> None:
        """Remove the files that `prepare` has created. With `everything`, remove the pool's whole folder."""
        token_path(name).unlink(missing_ok=True)
        _selectors_path(name).unlink(missing_ok=True)
        if everything:
            private_folders.remove_folder(token_path(name).parent)

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        """Return the lost nodes: those whose supervisor process has ended."""
        return Seen(
            lost={
                node.id: f"its supervisor (pid {node.supervisor.pid}) is gone"
                for node in nodes
                if node.supervisor and not node.supervisor.alive()
            }
        )

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        """Spawn a supervisor process for each node. The supervisor claims the node's row (writes its process id there),
        or exits if it cannot claim the row."""
        python = pool.spec.python or sys.executable
        for node in nodes:
            processes.spawn_detached(
                python_command("-m", self.supervisor, node.id, str(node.epoch), python=python),
                env=node_environment(node, python),
                log=log_path(node.pool, node.name),
            )

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """Send SIGTERM to the supervisors, kill all remaining processes, and remove the nodes' folders.

        The nodes of another user stay: their supervisors, and the other user's reconciler, read in the store that they
        have to end.
        """
        foreign: dict[str, str | None] = {}
        for node in nodes:
            if node.supervisor:
                try:
                    node.supervisor.signal(signal.SIGTERM)
                except PermissionError:
                    foreign[node.id] = (
                        f"its supervisor (pid {node.supervisor.pid}) belongs to another user, whose shoal ends it"
                    )
        nodes = [node for node in nodes if node.id not in foreign]
        until = time.monotonic() + TERMINATE_PATIENCE
        while time.monotonic() < until and any(node.supervisor and node.supervisor.alive() for node in nodes):
            time.sleep(0.05)  # a short pause, because a supervisor needs 0.3 to 2 s to end its node
        return foreign | {node.id: self._end_rest(node) for node in nodes}

    def existing(self) -> list[str]:
        """Return the ids of all nodes that have a folder on this host and belong to this process's `$SHOAL_HOME` and
        store."""
        return private_folders.node_ids()

    def clear(self, node_id: str) -> str | None:
        """End all processes of a node that has no row in the database, and remove the node's folder. The processes are
        found by their open files in this folder and by an environment variable."""
        return self._end_rest(NodeRef(node_id, node_id, "", 0, None))

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """Build the head's addresses from the data in the head's row, and add the path of the pool's token file."""
        return Endpoint(head["api"], head["gcs"], token_path(spec.name), versions.recorded(head))

    def log(self, node: NodeRef) -> str:
        """Return the path of the supervisor's log on this host."""
        return str(log_path(node.pool, node.name))

    def _end_rest(self, node: NodeRef) -> str | None:
        folders = private_folders.node_folders(node.id)

        def find() -> list[ProcessId]:
            found = processes.of_node(node.id, folders, node.supervisor)
            return [*found, node.supervisor] if node.supervisor and node.supervisor.alive() else found

        try:
            stuck = processes.end_all(find, patience=KILL_PATIENCE)
        except PermissionError:
            return "its processes belong to another user, whose shoal ends them"
        if stuck:
            return f"processes {', '.join(str(process.pid) for process in stuck)} do not end after SIGKILL"
        return private_folders.remove_node_folders(node.id)


def node_folder(node_id: str) -> Path:
    """Return the folder for a new node's sockets, logs and spilled objects."""
    return private_folders.runtime_root() / node_id


def log_path(pool: str, name: str) -> Path:
    """Return the path of the log that a node's supervisor writes."""
    return subfolder("pools", pool, "logs") / f"{name}.log"


def token_path(pool: str) -> Path:
    """Return the path of the pool's bearer token: a file of mode 0600, created by `up()` and removed by `down()`."""
    return subfolder("pools", pool) / "token"


def _selectors_path(pool: str) -> Path:
    return subfolder("pools", pool) / "gpus.json"


def _selectors(pool: str) -> dict[str, str] | None:
    """Return the environment variables that limit which GPUs the pool's nodes may use. The process that started the
    pool has recorded these variables in a file.

    The result is None for a pool that is down.
    """
    try:
        return dict(json.loads(_selectors_path(pool).read_text()))
    except FileNotFoundError:
        return None


_ASK_VERSIONS = (
    "from importlib.metadata import version; from importlib.util import find_spec; "
    "print(version('shoal'), find_spec('ray') is not None)"
)


def _check_python(python: str, *, needs_ray: bool) -> None:
    """Check that an interpreter can run the nodes of a pool.

    Raises:
        InvalidArgumentError: It cannot be run, or its environment has no shoal of this version, or no Ray.
    """
    try:
        ran = subprocess.run(
            python_command("-c", _ASK_VERSIONS, python=python), check=True, capture_output=True, text=True
        )
        shoal, has_ray = ran.stdout.split()
    except subprocess.CalledProcessError as error:
        reason = last_line(error.stderr, empty=str(error))
    except (OSError, ValueError) as error:
        reason = str(error)
    else:
        ours = versions.mine()["shoal"]
        if shoal != ours:
            reason = f"its environment has shoal {shoal}, and this process runs shoal {ours}"
        elif needs_ray and has_ray != "True":
            reason = f"its environment has no Ray: {pip_install('ray')} there"
        else:
            return
    raise InvalidArgumentError(
        f"python={python} cannot run the nodes of this pool: {reason}. The option has to be the path of an interpreter "
        "in whose environment the same version of shoal is installed"
    )


def node_environment(node: NodeRef, python: str = sys.executable) -> dict[str, str]:
    """Return all environment variables for the processes of a node.

    Args:
        node: The node.
        python: Interpreter that runs them.
    """
    environment, selectors = inherited_environment(), _selectors(node.pool)
    if python != sys.executable:
        environment.pop("VIRTUAL_ENV", None)  # names the environment of this process
    if selectors is not None:
        environment = {name: value for name, value in environment.items() if name not in SELECTORS} | selectors
    return {
        **environment,
        NODE_TAG: node.id,
        private_folders.ROOT_VARIABLE: str(private_folders.runtime_root()),
        # Jobs use the pool's Python interpreter, because the process that submits a job may run in another Python
        # environment.
        "SHOAL_PYTHON": python,
        "SHOAL_POOL": node.pool,
        # When Ray's dashboard is killed, it leaves folders in TMPDIR. TMPDIR is the node's folder here, so that these
        # folders are removed together with the node's folder.
        "TMPDIR": str(node_folder(node.id)),
        **ray_environment(token_path(node.pool)),
    }


ADVICE = "compile the packages once with `python -m compileall -q` and the folder of the packages"

_LARGE = ("ray", "sqlalchemy", "pydantic")
"""Packages that each node imports."""


def sources_without_bytecode() -> list[Path]:
    """Return the files of packages that Python has not compiled yet."""
    found = (find_spec(name) for name in _LARGE)
    files = [Path(spec.origin) for spec in found if spec is not None and spec.origin]
    return [file for file in files if not os.path.exists(cache_from_source(str(file)))]


def can_be_written(source: Path) -> bool:
    """Return whether Python can write the bytecode of a source file beside it."""
    folder = source.parent / "__pycache__"
    return os.access(folder if folder.exists() else source.parent, os.W_OK)
