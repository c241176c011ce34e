"""Script that runs as a Ray job on an existing cluster, and reports the software, disk, memory and clock of its nodes.

Usage: ``python -c <this file> JSON``. The script needs no package except the cluster's Ray. The last line that it
prints is the answer, as JSON: facts about the head, and about one other node if there is one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Mapping
from importlib import metadata
from typing import Any

_HEAD = "node:__internal_head__"


def facts(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts about this node: its software, its free disk and memory, its clock, and whether it reaches the
    store.
    """
    shm = "/dev/shm"
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "ray": _version("ray"),
        "shoal": _version("shoal"),
        "libraries": {
            name: next(filter(None, map(_version, names)), None) for name, names in order["libraries"].items()
        },
        "store": _call_error(lambda: _read_store(order["pool"])),
        "artifacts": _call_error(lambda: _try_out(order["artifact_location"]))
        if order.get("artifact_location")
        else None,
        "time": time.time(),
        "shm_bytes": shutil.disk_usage(shm).free if os.path.isdir(shm) else 0,
        "disk_bytes": shutil.disk_usage(os.environ.get("TMPDIR") or "/tmp").free,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _call_error(tried: Any) -> str | None:
    """Call a function, and return its error as text without a traceback; None if the call succeeds."""
    try:
        tried()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _read_store(pool: str) -> None:
    from shoal.state import Store
    from shoal.state.schema import Pool

    with Store(migrate=False).reading() as session:
        if session.get(Pool, pool) is None:
            raise LookupError(f'this node uses a store that has no pool "{pool}"')


def _try_out(location: str) -> None:
    import fsspec

    filesystem, folder = fsspec.core.url_to_fs(location)
    trial = f"{folder}/.shoal-preflight-{uuid.uuid4().hex}"
    filesystem.makedirs(folder, exist_ok=True)
    filesystem.pipe_file(trial, b"shoal")
    try:
        if filesystem.cat_file(trial) != b"shoal":
            raise OSError(f"the file {trial} was written, but its content cannot be read back")
    finally:
        filesystem.rm_file(trial)


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Collect the facts about the head and about one other node of the cluster."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    os.chdir("/")  # Ray's workers import first from this folder, to which only root can write
    ray.init(address=order["gcs"] or "auto", log_to_driver=False, logging_level="ERROR")
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD not in node["Resources"]]
    if not others:
        return {"head": facts(order), "worker": None}
    there = NodeAffinitySchedulingStrategy(others[0], soft=False)
    asked = ray.remote(facts).options(num_cpus=0, scheduling_strategy=there).remote(order)
    return {"head": facts(order), "worker": ray.get(asked, timeout=90)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
