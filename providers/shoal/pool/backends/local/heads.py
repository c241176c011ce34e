"""Define the kinds of nodes that run a `JobServer`: the head of a pool with Ray, and the only node of a pool without
Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.pool.backends.local.job_server import JobServer
from shoal.pool.endpoint import NO_GCS

if TYPE_CHECKING:
    from shoal.pool.backends.local.raylet import Raylet


class RayHead:
    """The head node of a pool with Ray. The head runs a `JobServer` instead of Ray's dashboard.

    Args:
        raylet: The running Ray node.
        jobs: Server that runs the drivers of jobs.
    """

    def __init__(self, raylet: Raylet, jobs: JobServer) -> None:
        self._raylet = raylet
        self._jobs = jobs
        self.dead = raylet.dead
        self.busy = raylet.busy
        self.drain = raylet.drain

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the node's addresses, including the URL of the Job API (``api``)."""
        return {**self._raylet.endpoint, "api": self._jobs.url}

    def stop(self) -> None:
        """End the node's processes."""
        self._jobs.close()
        self._raylet.stop()


class HeadWithoutRay:
    """The only node of a pool without Ray. The drivers of jobs start their workers as plain processes.

    Args:
        jobs: Server that runs the drivers of jobs.
    """

    def __init__(self, jobs: JobServer) -> None:
        self._jobs = jobs
        self.busy = jobs.busy
        self.stop = jobs.close

    @property
    def endpoint(self) -> dict[str, str]:
        """Return the URL of the Job API (``api``). The entries for Ray's address and Ray's node id are empty, because
        the pool runs without Ray."""
        return {"api": self._jobs.url, "gcs": NO_GCS, "ray_node_id": ""}

    def dead(self) -> str | None:
        """Return None. This node is a part of its supervisor process, so it cannot die while the supervisor runs."""
        return None

    def drain(self, seconds: float, reason: str) -> None:
        """Do nothing, because a pool never drains its only node."""
