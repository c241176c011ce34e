"""Run small scripts of shoal as jobs of a Ray cluster, through the HTTP API of the cluster's head."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import PoolUnreachableError
from shoal.pool.backends.ray_http import RayHead, last_line
from shoal.pool.timeouts import CLUSTER_JOB_PATIENCE

_RUN = 'exec env PYTHONSAFEPATH=1 "${SHOAL_PYTHON:-python}" -c "$0" "$@"'
"""Shell command that runs a script with the cluster's Python: `$SHOAL_PYTHON` if this variable is set on the cluster,
else `python`. The script imports nothing from the head's current folder. The variable replaces the option -P, which an
old Python would refuse, so that the preflight check can name the version."""


class ScriptRunner:
    """Runner of scripts on one Ray cluster.

    Args:
        head: Client of the cluster's head.
        cluster: The cluster in error messages, such as ``the Ray cluster at http://10.0.0.1:8265``.
        pool: Name of the pool, which marks the jobs.
        gcs: Address of the cluster's control service. None: the script finds it on its node.

    Raises:
        PoolUnreachableError: Raised by every method if the cluster does not answer or refuses the request.
    """

    def __init__(self, head: RayHead, cluster: str, pool: str, gcs: str | None = None) -> None:
        self._head = head
        self._cluster = cluster
        self._pool = pool
        self._gcs = gcs

    def submit(self, job_id: str, script: Path, order: Mapping[str, Any]) -> None:
        """Start a script as a Ray job with the id `job_id`, unless the cluster already has a job with this id."""
        argv = ["sh", "-c", _RUN, script.read_text(), json.dumps({"gcs": self._gcs, **order})]
        self._head.submit(argv, job_id, {"shoal_pool": self._pool})

    def answer(self, job_id: str) -> dict[str, Any]:
        """Wait until a submitted script has ended, and return its answer: the last line of its log, read as JSON."""
        status, log = self.outcome(job_id)
        if status != "SUCCEEDED":
            raise PoolUnreachableError(
                f"shoal's job on {self._cluster} ended with status {status}: {last_line(log)} (the cluster's dashboard "
                "shows the whole log)"
            )
        answer: dict[str, Any] = json.loads(last_line(log))
        return answer

    def outcome(self, job_id: str) -> tuple[str, str]:
        """Wait until a submitted script has ended, and return its status and its log."""
        until = time.monotonic() + CLUSTER_JOB_PATIENCE
        while (job := self._head.status(job_id)) is not None and not job.ended:
            if time.monotonic() > until:
                raise PoolUnreachableError(
                    f"{self._cluster} did not complete a small job of shoal within {CLUSTER_JOB_PATIENCE:.0f} s: check "
                    "in the cluster's dashboard whether the cluster can start jobs"
                )
            time.sleep(0.2)
        if job is None:
            raise PoolUnreachableError(
                f"{self._cluster} has lost shoal's job {job_id}: check whether the cluster's head was restarted, and "
                "try again"
            )
        return job.status, self._head.logs(job_id)

    def forget(self, job_id: str) -> None:
        """Delete an ended job from the cluster's list of jobs. If this fails, the job stays in the list."""
        with suppress(PoolUnreachableError):
            self._head.delete(job_id)
