"""HTTP client of a Ray cluster that others run: its nodes, its autoscaler, small jobs. It does not need Ray here."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shoal.errors import PoolUnreachableError
from shoal.pool.backends.ray.demand import ASKING, READ_ONLY
from shoal.pool.spec import PoolSpec
from shoal.pool.tunables import CLUSTER_JOB_PATIENCE, CLUSTER_PATIENCE

_MOST_NODES = 10_000
"""What the state API gives at most; it gives 100 if not asked."""

_RUN = 'exec "${SHOAL_PYTHON:-python}" -c "$0" "$@"'
"""The cluster's own Python, or the one that whoever set it up named."""

_ENDED = ("STOPPED", "SUCCEEDED", "FAILED")


class ConnectionRefusedByClusterError(PoolUnreachableError):
    """Nothing listens at the address: the head is gone, and with it the demand that it was told."""


@dataclass(frozen=True)
class ClusterNode:
    """A node that is alive."""

    id: str
    name: str
    is_head: bool
    ip: str
    cpus: int
    gpus: int
    memory_bytes: int = 0


class Cluster:
    """Client of the head of a `ray://` pool's cluster.

    Args:
        spec: The pool.

    Raises:
        PoolUnreachableError: From every method: nothing answers, it refuses us, or it is no Ray head.
    """

    def __init__(self, spec: PoolSpec) -> None:
        assert spec.address
        self._spec = spec
        self._address = spec.address.rstrip("/")

    def nodes(self) -> list[ClusterNode]:
        """Return the nodes that are alive, the head first, then by name."""
        answer = self._ask(
            "GET",
            "/api/v0/nodes",
            params={
                "detail": "true",
                "limit": str(_MOST_NODES),
                "filter_keys": "state",
                "filter_predicates": "=",
                "filter_values": "ALIVE",
            },
        )
        try:
            found = [_node(row) for row in answer["data"]["result"]["result"]]
        except (KeyError, TypeError) as error:
            raise self._no_ray() from error
        return sorted(found, key=lambda node: (not node.is_head, node.name, node.id))

    def autoscaling(self) -> bool | None:
        """Whether Ray's autoscaler runs it; None where the head's status does not say (autoscaler v2, or no monitor).

        A monitor that only reports, as `ray start --head` brings one, gives each node a type of its own, ``node_<id>``.
        """
        status = self._ask("GET", "/api/cluster_status")["data"].get("clusterStatus") or {}
        types = ((status.get("autoscalerReport") or {}).get("nodeTypeMapping") or {}).values()
        return any(not kind.startswith(READ_ONLY) for kind in types) if types else None

    def has_autoscaler(self) -> bool:
        """Return whether an autoscaler runs; if the head does not say, a job on the cluster finds out (about 3 s)."""
        known = self.autoscaling()
        if known is not None:
            return known
        job = f"shoal-look-{self._spec.name}-{time.time_ns()}"
        self.submit(job, {})
        answer = self.answer(job)
        self.forget(job)
        return answer["autoscaler"] is not None

    def submit(self, job_id: str, order: Mapping[str, Any]) -> None:
        """Run `demand` on the cluster, unless a job of this id is there already."""
        script = Path(__file__).with_name("demand.py").read_text()
        body = {
            "entrypoint": shlex.join(["sh", "-c", _RUN, script, json.dumps({"gcs": self._spec.gcs, **order})]),
            "submission_id": job_id,
            "metadata": {"shoal_pool": self._spec.name},
        }
        until = time.monotonic() + CLUSTER_JOB_PATIENCE
        while True:
            response = self._send("POST", "/api/jobs/", json=body)
            if response.is_success or "already exists" in response.text:
                return
            # A head that has just come up says 500 at first.
            if not response.is_server_error or time.monotonic() > until:
                raise PoolUnreachableError(
                    f"the Ray cluster at {self._address} takes no job: {_last_line(response.text)}"
                )
            time.sleep(0.5)

    def answer(self, job_id: str) -> dict[str, Any]:
        """Wait for what a submitted `demand` has to say."""
        status, log = self._outcome(job_id)
        if status != "SUCCEEDED":
            raise PoolUnreachableError(
                f"shoal's job on the Ray cluster at {self._address} ended with status {status}: {_last_line(log)}"
            )
        answer: dict[str, Any] = json.loads(_last_line(log))
        return answer

    def asked(self, job_id: str) -> bool:
        """Whether a submitted `demand` asked the autoscaler for something, or may have; waits for its end."""
        return ASKING in self._outcome(job_id)[1].splitlines()

    def _outcome(self, job_id: str) -> tuple[str, str]:
        until = time.monotonic() + CLUSTER_JOB_PATIENCE
        while (status := self._ask("GET", f"/api/jobs/{job_id}")["status"]) not in _ENDED:
            if time.monotonic() > until:
                raise PoolUnreachableError(
                    f"the Ray cluster at {self._address} has not run a small job within {CLUSTER_JOB_PATIENCE:.0f} s"
                )
            time.sleep(0.2)
        return str(status), str(self._ask("GET", f"/api/jobs/{job_id}/logs")["logs"])

    def jobs(self) -> list[str]:
        """Ids of the jobs submitted here for this pool that the cluster remembers."""
        return [
            str(row["submission_id"])
            for row in self._ask("GET", "/api/jobs/")
            if row.get("submission_id") and (row.get("metadata") or {}).get("shoal_pool") == self._spec.name
        ]

    def forget(self, job_id: str) -> None:
        """Have the cluster forget a job that has ended."""
        self._send("DELETE", f"/api/jobs/{job_id}")

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        response = self._send(method, path, **options)
        if response.is_server_error:
            why = f"{response.status_code}: {_last_line(response.text)}"
            raise PoolUnreachableError(f"the Ray cluster at {self._address} cannot answer now ({why})")
        try:
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPStatusError, ValueError) as error:
            raise self._no_ray() from error

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        token, unread = self._token()
        try:
            response = httpx.request(
                method,
                self._address + path,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=CLUSTER_PATIENCE,
                verify=not self._address.lower().startswith("http:"),  # loading certificates takes 40 ms of CPU
                trust_env=False,  # straight to the head, as the Job API's client does
                **options,
            )
        except httpx.ConnectError as error:
            # An address that cannot be reached now says nothing of the head: its autoscaler may hold nodes for us.
            refused = ConnectionRefusedByClusterError if _refused(error) else PoolUnreachableError
            raise refused(
                f"no Ray cluster answers at {self._address} ({error}): is it up, and is this the address of its "
                "dashboard (port 8265 by default)?"
            ) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise PoolUnreachableError(
                f"the Ray cluster at {self._address} does not answer ({error or type(error).__name__})"
            ) from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            if unread:
                raise PoolUnreachableError(unread)
            given = f"the token in {self._spec.token_file}" if self._spec.token_file else "a request without a token"
            hint = "is it this cluster's?" if self._spec.token_file else "give token_file= in the pool's URI"
            raise PoolUnreachableError(f"the Ray cluster at {self._address} refused {given}: {hint}")
        return response

    def _token(self) -> tuple[str, str | None]:
        """Return the token, and why it cannot be read. The reason is only reported if the cluster asks for a token."""
        if self._spec.token_file is None:
            return "", None
        try:
            return Path(self._spec.token_file).expanduser().read_text().strip(), None
        except OSError as error:
            why = f'token_file={self._spec.token_file} of pool "{self._spec.name}" cannot be read: {error.strerror}'
            return "", why

    def _no_ray(self) -> PoolUnreachableError:
        return PoolUnreachableError(
            f"{self._address} answers, but not as the head of a Ray cluster does: address= is the URL of its dashboard"
        )


def _refused(error: BaseException | None) -> bool:
    """Whether the cause is that nothing listens there."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    return _refused(error.__cause__ or error.__context__)


def _node(row: Mapping[str, Any]) -> ClusterNode:
    resources = row["resources_total"] or {}
    return ClusterNode(
        id=str(row["node_id"]),
        name=str(row["node_name"]),
        is_head=bool(row["is_head_node"]),
        ip=str(row["node_ip"]),
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        memory_bytes=int(resources.get("memory", 0)),
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(nothing)"
