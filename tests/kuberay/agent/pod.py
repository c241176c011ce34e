"""One pod: its network, its volumes, its containers in their order, its status, its end."""

from __future__ import annotations

import asyncio
import shutil
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kuberay.agent import names, volumes
from tests.kuberay.agent.api import MERGE, now
from tests.kuberay.agent.container import Container
from tests.kuberay.agent.variables import ConfigError
from tests.support.network_hosts import Host

if TYPE_CHECKING:
    from tests.kuberay.agent.node import Node

ORDER = "shoal.test/order"
"""The annotation that orders a fault: "oom" ends the first container as if it were out of memory, "evict" the pod."""

EVICTED = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 12Mi."


class Pod:
    """A pod that is bound to this node."""

    host: Host

    def __init__(self, node: Node, manifest: dict[str, Any]) -> None:
        self.node, self.manifest = node, manifest
        self.uid: str = manifest["metadata"]["uid"]
        name = f"{manifest['metadata']['namespace']}_{manifest['metadata']['name']}_{self.uid}"
        self.folder, self.logs = node.folder / "pods" / self.uid, node.folder / "logs" / name
        self.volumes: dict[str, Path] = {}
        self.ending = False
        self.inits: list[Container] = []
        self.inits = [Container(self, spec, init=True) for spec in manifest["spec"].get("initContainers", ())]
        self.containers = [Container(self, spec, init=False) for spec in manifest["spec"]["containers"]]
        self._began = now()
        self._address = ""
        self._failure: dict[str, str] = {}
        self._recorded: set[tuple[str, str]] = set()
        self._transitions: dict[str, tuple[str, str]] = {}
        self._publishing = asyncio.Lock()
        self._published: dict[str, Any] = {}
        self._events: set[asyncio.Task[None]] = set()
        self._obeyed = ""
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(_show_error)
        self._end: asyncio.Task[None] | None = None

    def changed(self, manifest: dict[str, Any]) -> None:
        """Take over a change that somebody made: an order, or the wish that the pod ends."""
        self.manifest = manifest
        order = manifest["metadata"].get("annotations", {}).get(ORDER, "")
        if order != self._obeyed:
            self._obeyed = order
            self._events.add(asyncio.create_task(self._obey(order)))
        if manifest["metadata"].get("deletionTimestamp") and self._end is None:
            self._end = asyncio.create_task(self._delete())

    def gone(self) -> None:
        """End at once: the pod's object is gone, for instance deleted by force."""
        if self._end is None:
            self._end = asyncio.create_task(self._delete(grace=0))

    def grace(self) -> float:
        """Seconds that containers have to end."""
        asked = self.manifest["metadata"].get("deletionGracePeriodSeconds")
        return float(self.manifest["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked)

    def seen(self) -> dict[str, Any]:
        """The manifest with the addresses as they are now."""
        status = {"podIP": self._address, "podIPs": [{"ip": self._address}], "hostIP": self.node.settings.address}
        return self.manifest | {"status": self.manifest.get("status", {}) | status}

    def write_hosts(self) -> None:
        """Bring the hosts file up to date."""
        if self._address and self.folder.exists():
            names.rewrite(self.folder / "hosts", self.node.names.hosts(self.manifest, self._address))

    async def event(self, kind: str, reason: str, message: str) -> None:
        """Record an event; the same one only once."""
        if (reason, message) not in self._recorded:
            self._recorded.add((reason, message))
            recording = asyncio.create_task(
                self.node.api.record(self.manifest, kind, reason, message, self.node.settings.name)
            )
            self._events.add(recording)
            recording.add_done_callback(self._events.discard)

    async def publish(self) -> None:
        """Write the status as it is now; wait while the API server is away."""
        async with self._publishing:
            about = self.manifest["metadata"]
            path = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}/status"
            # The uid makes the API server refuse the status if another pod has the name now.
            body = {"metadata": {"uid": self.uid}, "status": self._status()}
            if body == self._published:
                return
            await self.node.api.send_until_answered("PATCH", path, body, MERGE)
            self._published = body

    async def _run(self) -> None:
        self.host = self.node.new_host()
        self._address = self.host.address
        self.folder.mkdir(parents=True)
        (self.folder / "resolv.conf").write_text("")
        self.write_hosts()
        await self._make_volumes()
        renewing = asyncio.create_task(volumes.renew_tokens(self.node.api, self.manifest, self.volumes))
        try:
            await self.publish()
            for container in self.inits:
                if await container.run():
                    return
            for container in self.containers:
                if "waiting" in container.state:
                    container.state = {"waiting": {"reason": "ContainerCreating"}}
            await asyncio.gather(*(container.run() for container in self.containers))
        finally:
            renewing.cancel()
        await self.publish()

    async def _make_volumes(self) -> None:
        while True:
            try:
                self.volumes = await volumes.make(self.node.api, self.manifest, self.folder / "volumes")
                return
            except ConfigError as error:
                await self.event("Warning", "FailedMount", str(error))
                await self.publish()
                await asyncio.sleep(1)

    async def _obey(self, order: str) -> None:
        if order == "oom":
            self.containers[0].kill("OOMKilled")
        elif order == "evict":
            self._failure = {"reason": "Evicted", "message": EVICTED}
            await self.event("Warning", "Evicted", EVICTED)
            await self._stop(0)
            await self.publish()

    async def _delete(self, grace: float | None = None) -> None:
        await self.event("Normal", "Killing", f"Stopping container {self.containers[0].name}")
        await self._stop(self.grace() if grace is None else grace)
        await self.publish()
        about = self.manifest["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        await self.node.api.send_until_answered(
            "DELETE", f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}", body
        )
        self.node.forget(self)
        await self.node.release(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _stop(self, grace: float) -> None:
        """Stop all containers; nothing of the pod runs afterwards."""
        self.ending = True
        await asyncio.gather(*(container.stop(grace) for container in [*self.inits, *self.containers]))
        self._running.cancel()
        await asyncio.wait([self._running])
        # A container that was starting meanwhile, and one that waited for its restart.
        await asyncio.gather(*(container.stop(0) for container in [*self.inits, *self.containers]))
        if hasattr(self, "host"):
            self.node.remove_host(self.host)
        for container in [*self.inits, *self.containers]:
            container.ready = False
            self.node.limits.remove(f"{self.uid}-{container.name}")

    def _status(self) -> dict[str, Any]:
        phase = self._phase()
        ready = phase == "Running" and all(container.ready for container in self.containers)
        initialized = all(container.code == 0 for container in self.inits)
        waiting = "ContainersNotReady" if not ready else None
        status: dict[str, Any] = {
            "phase": phase,
            "startTime": self._began,
            "hostIP": self.node.settings.address,
            "hostIPs": [{"ip": self.node.settings.address}],
            "conditions": [
                self._condition("PodReadyToStartContainers", bool(self._address) and not self.ending),
                self._condition("Initialized", initialized, None if initialized else "ContainersNotInitialized"),
                self._condition("ContainersReady", ready, waiting),
                self._condition("Ready", ready, waiting),
            ],
            "containerStatuses": [container.status() for container in self.containers],
            **self._failure,
        }
        if self.inits:
            status["initContainerStatuses"] = [container.status() for container in self.inits]
        if self._address:
            status |= {"podIP": self._address, "podIPs": [{"ip": self._address}]}
        if self._failure:
            status["conditions"].append(
                {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": EVICTED}
            )
        return status

    def _phase(self) -> str:
        if self._failure:
            return "Failed"
        policy = self.manifest["spec"].get("restartPolicy", "Always")
        if any("terminated" in each.state and each.code and (policy == "Never" or self.ending) for each in self.inits):
            return "Failed"
        if all("waiting" in each.state and not each.last_state for each in self.containers):
            return "Pending"
        codes = [each.code if "terminated" in each.state else None for each in self.containers]
        if None in codes:
            return "Running"
        failed = any(codes)
        if not self.ending and (policy == "Always" or (policy == "OnFailure" and failed)):
            return "Running"
        return "Failed" if failed else "Succeeded"

    def _condition(self, kind: str, true: bool, reason: str | None = None) -> dict[str, Any]:
        status = "True" if true else "False"
        last, since = self._transitions.get(kind, ("", ""))
        if last != status:
            since = now()
            self._transitions[kind] = (status, since)
        names_ = [each.name for each in self.containers if not each.ready]
        message = f"containers with unready status: [{' '.join(names_)}]" if reason == "ContainersNotReady" else ""
        return {"type": kind, "status": status, "lastTransitionTime": since, "reason": reason or "", "message": message}


def _show_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        print("a pod's task has ended with an error:", *traceback.format_exception(error), flush=True)
