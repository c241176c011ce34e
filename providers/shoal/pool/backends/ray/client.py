"""HTTP client of an existing Ray cluster: list the cluster's nodes, check for an autoscaler, and run small jobs. Ray
need not be installed on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import PoolUnreachableError
from shoal.pool.backends.ray.autoscaler_job import ASKING, READ_ONLY
from shoal.pool.backends.ray.token_file import ca_path, token_path
from shoal.pool.backends.ray_http import BusyClusterError, Failure, Problem, RayHead
from shoal.pool.backends.ray_nodes import ClusterNode, alive_nodes, python_version
from shoal.pool.backends.ray_scripts import ScriptRunner
from shoal.pool.spec import PoolSpec

_AUTOSCALER_JOB = Path(__file__).with_name("autoscaler_job.py")


class ConnectionRefusedByClusterError(PoolUnreachableError):
    """The connection to the head was refused. So the head has ended, and all requests for nodes that it had received
    are lost."""


class Cluster:
    """HTTP client of the Ray cluster of a `ray://` pool. All requests go to the cluster's head.

    Args:
        spec: The pool.
        token: Bearer token. None: the token in the pool's file.

    Raises:
        PoolUnreachableError: Raised by every method if the cluster does not answer or refuses the request, or if the
            address is not that of a Ray head.
    """

    def __init__(self, spec: PoolSpec, token: str | None = None) -> None:
        assert spec.address
        self._spec = spec
        self._address = spec.address.rstrip("/")
        token, self._unread = _token(spec) if token is None else (token, None)
        self._head = RayHead(self._address, token, ca=ca_path(spec), error=self._pool_error)
        self.scripts = ScriptRunner(self._head, f"the Ray cluster at {self._address}", spec.name, spec.gcs)
        """Runs scripts on the cluster."""

    def nodes(self) -> list[ClusterNode]:
        """Return the cluster's nodes that are alive: first the head, then the other nodes, sorted by name."""
        return alive_nodes(self._head)

    def python(self) -> str | None:
        """Return the full version of the cluster's Python, such as 3.11.7, or None if the head does not report it."""
        return python_version(self._head)

    def autoscaling(self) -> bool | None:
        """Return whether the cluster has a Ray autoscaler. Return None if the head's status does not show this, because
        the cluster has autoscaler v2 or no monitor process.

        A cluster started with `ray start --head` has no autoscaler. Its monitor process gives each node a type of its
        own, ``node_<id>``. So such types do not show that the cluster has an autoscaler.
        """
        types = self._head.get("/api/cluster_status", _node_types)
        return any(not kind.startswith(READ_ONLY) for kind in types) if types else None

    def has_autoscaler(self) -> bool:
        """Return whether the cluster has an autoscaler. If the head's status does not show this, run a small job on the
        cluster that looks for an autoscaler, which takes about 3 s."""
        known = self.autoscaling()
        if known is not None:
            return known
        job = f"shoal-look-{self._spec.name}-{time.time_ns()}"
        self.submit(job, {})
        answer = self.scripts.answer(job)
        self.forget(job)
        return answer["autoscaler"] is not None

    def submit(self, job_id: str, order: Mapping[str, Any]) -> None:
        """Start the script `autoscaler_job.py` as a Ray job, unless the cluster already has a job with this id."""
        self.scripts.submit(job_id, _AUTOSCALER_JOB, order)

    def asked(self, job_id: str) -> bool:
        """Wait until a submitted job with the script `autoscaler_job.py` has ended. Return whether the job has, or may
        have, requested nodes from the autoscaler."""
        return ASKING in self.scripts.outcome(job_id)[1].splitlines()

    def jobs(self) -> list[str]:
        """Return the ids of the jobs that shoal has submitted to the cluster for this pool, such as requests for
        nodes."""
        return self._head.get("/api/jobs/", self._own_jobs)

    def forget(self, job_id: str) -> None:
        """Delete an ended job from the cluster's list of jobs. A job that still runs is not deleted."""
        with suppress(BusyClusterError):
            self._head.delete(job_id)

    def _own_jobs(self, rows: Any) -> list[str]:
        return [
            str(row["submission_id"])
            for row in rows
            if row.get("submission_id") and (row.get("metadata") or {}).get("shoal_pool") == self._spec.name
        ]

    def _pool_error(self, failure: Failure) -> PoolUnreachableError:
        cluster, reason = f"the Ray cluster at {self._address}", failure.reason
        match failure:
            case Failure(problem=Problem.NOTHING_LISTENS | Problem.NO_CONNECTION):
                # If the address cannot be reached, the head may still run, and its autoscaler may keep nodes for this
                # pool. Only a refused connection shows that the head has ended.
                is_gone = failure.problem is Problem.NOTHING_LISTENS
                return (ConnectionRefusedByClusterError if is_gone else PoolUnreachableError)(
                    f"no Ray cluster answers at {self._address} ({reason}): check that the cluster is up, and that "
                    "this is the address of its dashboard (port 8265 by default)"
                )
            case Failure(problem=Problem.SLOW | Problem.NO_ANSWER):
                return PoolUnreachableError(f"{cluster} does not answer ({reason})")
            case Failure(problem=Problem.TOKEN_REFUSED):
                file = self._spec.token_file
                given = f"the token in {file}" if file else "a request without a token"
                hint = "write this cluster's token to the file" if file else "give token_file= in the pool's URI"
                return PoolUnreachableError(self._unread or f"{cluster} refused {given}: {hint}")
            case Failure(problem=Problem.BUSY | Problem.REFUSED, method="POST"):
                is_busy = failure.problem is Problem.BUSY
                return (BusyClusterError if is_busy else PoolUnreachableError)(f"{cluster} accepts no jobs: {reason}")
            case Failure(problem=Problem.BUSY):
                return BusyClusterError(f"{cluster} cannot answer now ({failure.status}: {reason})")
        return PoolUnreachableError(
            f"the server at {self._address} is not the head of a Ray cluster: set address= to the URL of the cluster's "
            "dashboard"
        )


def _token(spec: PoolSpec) -> tuple[str, str | None]:
    """Return the pool's bearer token, and an error text if the token file cannot be read. The error text is reported
    only if the cluster refuses a request because of the token."""
    path = token_path(spec)
    if path is None:
        return "", None
    try:
        return path.read_text().strip(), None
    except OSError as error:
        return "", f'token_file={path} of pool "{spec.name}" cannot be read: {error.strerror}'


def _node_types(answer: Any) -> list[str]:
    status = answer["data"].get("clusterStatus") or {}
    return list(((status.get("autoscalerReport") or {}).get("nodeTypeMapping") or {}).values())
