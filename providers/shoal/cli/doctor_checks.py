"""The checks of `shoal doctor`.

The checks do not import optional packages, because these imports are slow. The checks do not start or end processes.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.cli.output import describe_counts
from shoal.errors import ShoalError, StoreError
from shoal.installation import name, others, pip_install
from shoal.pool.backends.interface import DISK_NEEDED, DISK_WANTED, Finding, Status
from shoal.pool.backends.local import backend
from shoal.pool.backends.versions import installed, untested_ray
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.databases import sqlite_file
from shoal.state.home import default_url, home
from shoal.state.private_folders import runtime_root

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus

_MB = 1024**2
_GB = 1024**3

_RAY_DISK_LIMIT = 0.95
"""Used share of a disk (0 to 1) above which Ray considers the disk full. Ray does not move objects from memory to a
full disk, so a training may run out of memory."""

_FILES_NEEDED = 1024
_FILES_WANTED = 4096
"""Smallest and recommended number of files that a process may have open. A raylet (Ray's main process of a node) needs
several open files for each worker and connection. The checks compare these numbers with the hard limit, because Ray
raises the soft limit to the hard limit."""

_PACKAGES = (
    ("data", ("pyarrow", "pandas", "numpy"), ("pyarrow",), "rows that this process reads or stages; nodes need it"),
    *((name, (name,), each.distributions, each.estimator) for name, each in BOOSTING_LIBRARIES.items()),
    ("torch", ("torch",), ("torch",), "PyTorchDistributor"),
    ("mlflow", ("mlflow",), ("mlflow",), "tracking and the model registry; jobs run untracked without it"),
    ("airflow", ("airflow",), ("apache-airflow",), "the Airflow provider"),
    ("prefect", ("prefect",), ("prefect",), "the Prefect collection"),
    ("ui", ("fastapi", "jinja2", "plotly", "uvicorn"), ("plotly",), "the page of `shoal ui` and of Airflow's plugin"),
    ("tune", ("optuna",), ("optuna",), "searches for parameters"),
    ("postgres", ("psycopg",), ("psycopg",), "a state store in PostgreSQL"),
    ("s3", ("s3fs",), ("s3fs",), "datasets, models and files in S3"),
    ("delta", ("deltalake",), ("deltalake",), "Delta tables; the head of a pool lists them"),
    ("iceberg", ("pyiceberg",), ("pyiceberg",), "Iceberg tables; the head of a pool lists them"),
    ("adbc", ("adbc_driver_postgresql",), ("adbc-driver-postgresql",), "faster queries of PostgreSQL"),
    ("kuberay", ("kubernetes",), ("kubernetes",), "pools on Kubernetes"),
    ("otel", ("opentelemetry",), ("opentelemetry-sdk",), "metrics for OpenTelemetry"),
)
"""Optional packages, one tuple for each extra of shoal. A tuple contains the name of the extra, the modules that the
extra installs, the PyPI names of the package whose version is shown, and the part of shoal that needs the extra."""


def all_checks() -> Iterator[Finding]:
    """Run all checks of `shoal doctor`, and yield their results."""
    # This check always succeeds, because pip installs shoal only for supported versions of Python.
    yield Finding("Python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    for other in others():
        advice = f"remove it with `pip uninstall {other}`, then run `pip install --force-reinstall {name()}`"
        yield Finding("shoal", "broken", f"the distribution {other} installs a package shoal, too", advice)
    yield _ray()
    for extra, modules, distributions, purpose in _PACKAGES:
        found = {name: version for name in distributions if (version := installed(name))}
        if not found or any(find_spec(module) is None for module in modules):
            yield Finding(extra, "note", f"not installed (optional: {purpose})", pip_install(extra))
        elif len(found) > 1:
            advice = f"install one of them: `pip uninstall {' '.join(found)}`, then the one that you need"
            yield Finding(extra, "note", f"{' and '.join(found)} have installed the same files", advice)
        else:
            yield Finding(extra, "ok", *found.values())
    yield _bytecode()
    has_proc = Path("/proc/self/stat").exists() and Path("/proc/sys/kernel/random/boot_id").exists()
    state = "available" if has_proc else "not available"
    yield _judged("/proc", state, "local pools need Linux with /proc mounted", is_broken=not has_proc)
    yield _loopback()
    yield _open_files()
    yield from _home()


def leftovers(store: Store) -> list[str]:
    """Return the ids of nodes that have processes or files on this host but are missing from the state store."""
    from shoal.pool.reconciling import left_over

    return [node_id for _, node_id in left_over(store)]


def _ray() -> Finding:
    install, found = pip_install("ray"), installed("ray")
    if found is None or find_spec("ray") is None:
        return Finding("ray", "broken", "not installed", f"{install}; not needed if you only use remote pools")
    if find_spec("aiohttp_cors") is None:
        return Finding("ray", "broken", f"{found}, without the packages of ray[default], which nodes need", install)
    warning = untested_ray()
    return Finding("ray", "ok" if warning is None else "note", found, warning)


def _bytecode() -> Finding:
    without = backend.sources_without_bytecode()
    if not without:
        return Finding("bytecode", "ok", "the packages are compiled")
    folder = without[0].parents[1]
    writable = backend.can_be_written(without[0])
    effect = "so the first node starts slowly" if writable else "and nodes may not write there"
    found = f"the packages in {folder} are not compiled, {effect}"
    return Finding("bytecode", "note", found, f"python -m compileall -q {folder}")


def _loopback() -> Finding:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5)
            client.connect(server.getsockname())
    except OSError as error:
        advice = "start the network interface lo: `ip link set lo up`"
        return Finding("loopback", "broken", f"127.0.0.1 does not work: {error}", advice)
    return Finding("loopback", "ok", "127.0.0.1 listens and answers")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    found = f"{soft}, can be raised to {'any number' if hard == resource.RLIM_INFINITY else hard}"
    advice = f"raise the hard limit: `ulimit -Hn {_FILES_WANTED}` or more, or LimitNOFILE= in a systemd service"
    return _judged("open files", found, advice, is_broken=limit < _FILES_NEEDED, is_low=limit < _FILES_WANTED)


def _judged(name: str, found: str, advice: str, *, is_broken: bool = False, is_low: bool = False) -> Finding:
    """Return the result of a check, with the advice if there is a problem."""
    status: Status = "broken" if is_broken else "note" if is_low else "ok"
    return Finding(name, status, found, None if status == "ok" else advice)


def _home() -> Iterator[Finding]:
    try:
        folder = home()
    except StoreError as error:
        yield Finding("SHOAL_HOME", "broken", str(error), "set SHOAL_HOME to a writable folder")
        return
    yield Finding("SHOAL_HOME", "ok", f"{folder} is writable")
    yield _disk("disk of SHOAL_HOME", folder)
    temporary = Path(tempfile.gettempdir())
    if os.access(temporary, os.W_OK | os.X_OK):
        yield _disk("disk of temporary files", temporary)
    else:
        advice = "set TMPDIR to a short, writable path"
        yield Finding("disk of temporary files", "broken", f"{temporary} is not writable", advice)
    try:
        found = f"{runtime_root()}, not accessible to other users"
        yield Finding("folder of running nodes", "ok", found)
    except StoreError as error:
        yield Finding("folder of running nodes", "broken", str(error), "set TMPDIR to a short path, such as /tmp")
    yield from _store()


def _disk(name: str, folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / _GB:.1f} GB free in {folder}"
    advice = "free some space, or use another disk: set SHOAL_HOME for shoal's files, TMPDIR for those of running nodes"
    is_low = usage.free < DISK_WANTED or usage.used > _RAY_DISK_LIMIT * usage.total
    return _judged(name, found, advice, is_broken=usage.free < DISK_NEEDED, is_low=is_low)


def _store() -> Iterator[Finding]:
    from shoal.pool.api import list_pools
    from shoal.pool.selection import POOL_VARIABLE

    before = _store_mode()
    try:
        store = Store()
        pools = list_pools(store)
    except (ShoalError, ImportError) as error:
        yield Finding("state store", "broken", str(error), "fix the problem that this message names")
        return
    found = f"can be opened; pools: {len(pools)}"
    is_open = before is not None and bool(before & 0o077)
    if before is not None:
        found += f"; had mode {before:04o}, now 0600" if is_open else f"; only you can read it (mode {before:04o})"
    advice = "if other users could enter its folder, they could read the specs and errors of jobs"
    yield _judged("state store", found, advice, is_low=is_open)
    yield _shared_memory(pools)
    yield from (_pool(pool) for pool in pools)
    chosen = os.environ.get(POOL_VARIABLE)
    is_missing = bool(chosen) and chosen not in [pool.name for pool in pools]
    found = f"{chosen}, which does not exist" if is_missing else chosen or "not set"
    advice = f"unset {POOL_VARIABLE}, or run `shoal pool up local://{chosen}`"
    yield _judged(POOL_VARIABLE, found, advice, is_low=is_missing)
    yield reconciler(pools)
    left = leftovers(store)
    yield _judged("left-over nodes", ", ".join(left) or "none", "end them with `shoal sweep`", is_low=bool(left))


def _store_mode() -> int | None:
    """Return the mode of the SQLite file of the store; None if there is no such file."""

    try:
        file = sqlite_file(default_url())
        return None if file is None else stat.S_IMODE(file.stat().st_mode)
    except (StoreError, OSError):
        return None


def _shared_memory(pools: list[PoolStatus]) -> Finding:
    name = "/dev/shm"
    # `wanted` is the memory that all nodes of all pools may use together. Ray allocates this memory only when objects
    # need it, so most of it is not yet in use. Therefore `wanted` is compared with the free memory.
    up = [pool.uri for pool in pools if pool.state != "down" and pool.uri.startswith("local://")]
    specs = [PoolSpec.parse(uri) for uri in up] or [PoolSpec(name="default")]
    wanted = sum(spec.max_nodes * spec.object_store_mb for spec in specs) * _MB
    try:
        free = shutil.disk_usage(name).free
    except OSError:
        return Finding(
            name, "note", "does not exist: object stores are on disk, which is slow", "mount a tmpfs at /dev/shm"
        )
    found = f"{free / _MB:.0f} MB free; object stores may use {wanted / _MB:.0f} MB"
    advice = "enlarge /dev/shm (Docker: --shm-size), or reduce object_store_mb or max_nodes"
    return _judged(name, found, advice, is_low=free < wanted)


def _pool(pool: PoolStatus) -> Finding:
    name = f"pool {pool.name}"
    counts = describe_counts(pool)
    found = f"{pool.state}, {counts}" + (f"; {pool.reason}" if pool.reason else "")
    if not pool.is_here:
        return Finding(name, "note", f"{found}; bound to host {pool.host}", f"use the pool on host {pool.host}")
    there = len(pool.active) + len(pool.pending) + len(pool.failed) + len(pool.leaving)
    advice = f"see `shoal pool describe {pool.name}`; repair with `shoal sweep`"
    return _judged(name, found, advice, is_low=bool(pool.failed) or not len(pool.active) == there == pool.target)


def reconciler(pools: list[PoolStatus]) -> Finding:
    """Check whether the reconciler (the background process that manages the pools) runs and is not suspended.

    Reconcilers of other `$SHOAL_HOME` folders are ignored. The function searches all processes. It does not test the
    reconciler's lock, because a reconciler that starts during the test would find the lock taken, and exit.
    """
    import psutil

    for process in psutil.process_iter():
        try:
            if "shoal.reconciler" not in process.cmdline() or process.environ().get("SHOAL_HOME") != str(home()):
                continue
            if process.status() != psutil.STATUS_STOPPED:
                return Finding("reconciler", "ok", f"runs, pid {process.pid}")
            return Finding(
                "reconciler",
                "note",
                f"is suspended (SIGSTOP), pid {process.pid}: dead nodes are not replaced, and leases do not expire",
                f"resume it with `kill -CONT {process.pid}`, or have it replaced with `kill -KILL {process.pid}`",
            )
        except psutil.Error:  # the process has ended, or belongs to another user, so it is not this user's reconciler
            continue
    if any(pool.state != "down" and pool.is_here for pool in pools):
        return Finding("reconciler", "note", "does not run although a pool is up", "start it with `shoal sweep`")
    return Finding("reconciler", "ok", "does not run: no pool is up")
