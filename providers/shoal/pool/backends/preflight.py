"""Check before the first training whether an existing Ray cluster can run shoal's jobs. The check covers versions,
libraries, access to the store, disk space and clocks."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.errors import PoolUnreachableError
from shoal.installation import pip_install
from shoal.pool.backends import backend_of, versions
from shoal.pool.backends.interface import DISK_NEEDED, DISK_WANTED, Finding, Status
from shoal.pool.spec import PoolSpec
from shoal.secrets.redaction import redact
from shoal.state.home import subfolder

log = logging.getLogger(__name__)

_JOB = Path(__file__).with_name("preflight_job.py")

_MB = 1024**2
_GB = 1024**3

_SHM_WANTED = 256 * _MB
"""Recommended number of free bytes of shared memory on a node. Ray keeps objects in shared memory, and a container has
only 64 MB of shared memory by default."""

_CLOCK_S = 5.0
"""Largest difference in seconds between the clocks of this machine and of a node. With a larger difference, displayed
times would be misleading."""

_TOOLS = ("s3fs", "psycopg")
"""Libraries in the report of `preflight_job.py` that cannot train a model."""

_LIBRARIES = {
    **{name: each.distributions for name, each in BOOSTING_LIBRARIES.items()},
    **{name: (name,) for name in ("torch", "mlflow", *_TOOLS)},
}
"""Libraries in this report, and the names under which PyPI has them."""

_SAME = ("python", "ray", "shoal")
"""Software that has to have the same version on all nodes."""


def preflight(spec: PoolSpec, artifact_location: str | None = None) -> list[Finding]:
    """Check a Ray cluster with a small job, and return the findings about the head and about one other node.

    Raises:
        PoolUnreachableError: The cluster does not answer, or cannot run the job.
    """
    order = {"pool": spec.name, "artifact_location": artifact_location, "libraries": _LIBRARIES}
    before = time.time()
    answer = backend_of(spec).script_runner(spec).run("preflight", _JOB, order)
    return judge(answer, versions.mine(), artifact_location, before, time.time())


def preflight_once(spec: PoolSpec) -> list[Finding]:
    """Run :func:`preflight`, unless an earlier run from this Python environment has found that jobs can run on this
    pool.

    Problems are logged as warnings. If the cluster does not answer, nothing is checked.
    """
    checked = f"{spec.uri} {sorted(versions.mine().items())}"
    mark = subfolder("preflight") / hashlib.sha256(checked.encode()).hexdigest()
    if mark.exists():
        return []
    try:
        found = [each for each in preflight(spec) if each.status != "ok"]
    except PoolUnreachableError as error:
        log.warning("the nodes of pool %s were not checked: %s", spec.name, error)
        return []
    for each in found:
        log.warning("pool %s: %s", spec.name, each)
    broken = [each for each in found if each.status == "broken"]
    if not broken:
        mark.touch()
    return broken


def judge(
    answer: Mapping[str, Any], mine: Mapping[str, str], artifact_location: str | None, before: float, after: float
) -> list[Finding]:
    """Convert the answer of the script `preflight_job.py` to a list of findings."""
    head, worker = answer["head"], answer["worker"]
    found = [*_of_host("head", head, mine, artifact_location, before, after)]
    if worker is None:
        return [*found, Finding("worker", "note", "the cluster has only its head, so no other node was checked")]
    found += _of_host("worker", worker, mine, artifact_location, before, after)
    # Nodes with different versions of Python or Ray cannot work together.
    must = [f"{name} {head[name]} and {worker[name]}" for name in _SAME if head[name] != worker[name]]
    there = worker["libraries"]
    may = [f"{name} {one} and {there[name]}" for name, one in head["libraries"].items() if one != there[name]]
    if must or may:
        advice = "install the same versions on all nodes"
        return [*found, Finding("head and worker", "broken" if must else "note", ", ".join([*must, *may]), advice)]
    return [*found, Finding("head and worker", "ok", "the same versions")]


def _of_host(
    where: str,
    facts: Mapping[str, Any],
    mine: Mapping[str, str],
    artifact_location: str | None,
    before: float,
    after: float,
) -> Iterator[Finding]:
    def judged(name: str, status: Status, found: str, advice: str | None = None) -> Finding:
        return Finding(f"{where}: {name}", status, found, None if status == "ok" else advice)

    for name, title in (("python", "Python"), ("shoal", "shoal")):
        theirs, ours = facts[name], mine.get(name)
        if theirs is None:
            yield judged(title, "broken", "not installed", f"install {name} {ours} there")
        elif ours and versions.minor(theirs) != versions.minor(ours):
            advice = f"use {title} {versions.minor(ours)} there, or {versions.minor(theirs)} here"
            yield judged(title, "broken", f"{theirs}, and this process has {ours}", advice)
        else:
            yield judged(title, "ok", theirs)
    tested = versions.TESTED_RAY
    ray: Status = "ok" if versions.minor(facts["ray"] or "") == tested else "note"
    yield judged("Ray", ray, str(facts["ray"]), f"shoal is tested with Ray {tested}: use it if jobs fail")
    there = {name: version for name, version in facts["libraries"].items() if version}
    if any(name not in _TOOLS for name in there):
        yield judged("libraries", "ok", ", ".join(f"{name} {version}" for name, version in sorted(there.items())))
    else:
        advice = f"install those that your jobs need, such as {pip_install('xgboost,mlflow,s3,postgres')}"
        yield judged("libraries", "note", "no training library", advice)
    if facts["store"] is None:
        yield judged("store", "ok", "reached")
    # An unreachable store is a problem only on the head, because only the drivers of jobs need the store, and drivers
    # run on the head.
    elif where == "head":
        advice = "set SHOAL_STATE_URL in the environment of the head to the store of this process (PostgreSQL)"
        yield judged("store", "broken", redact(facts["store"]), advice)
    if artifact_location is not None:
        error = facts["artifacts"] and redact(facts["artifacts"])
        advice = (
            "check address, rights and network; a job has the credentials of its submitter, this check only the node's"
        )
        yield judged("artifact_location", "note" if error else "ok", error or "writable", advice)
    off = max(before - facts["time"], facts["time"] - after, 0.0)
    advice = f"set the clock of {facts['host']} (chrony or NTP): displayed times would mislead"
    yield judged("clock", "note" if off > _CLOCK_S else "ok", f"differs by {off:.0f} s", advice)
    free = facts["shm_bytes"]
    advice = "start the container with more shared memory, such as --shm-size=1g"
    yield judged("/dev/shm", "note" if free < _SHM_WANTED else "ok", f"{free / _MB:.0f} MB free", advice)
    disk = facts["disk_bytes"]
    status: Status = "broken" if disk < DISK_NEEDED else "note" if disk < DISK_WANTED else "ok"
    yield judged("disk", status, f"{disk / _GB:.1f} GB free", f"free some space on {facts['host']}")
