"""The node itself: its object, its lease, its pods."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests.kuberay.agent.api import MERGE, Api, now
from tests.kuberay.agent.limits import MemoryLimits
from tests.kuberay.agent.logs import serve_logs
from tests.kuberay.agent.names import Names
from tests.kuberay.agent.pod import Pod
from tests.kuberay.agent.settings import AgentSettings
from tests.support.network_hosts import Host, Switch

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
HEARTBEAT_S = 2


class Node:
    """A node of the cluster."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.api = Api(settings.server, settings.token, settings.authority)
        self.folder = Path(settings.folder)
        self.names = Names()
        self.limits = MemoryLimits(f"{settings.switch}-{settings.name}")
        self.pods: dict[str, Pod] = {}
        self._switch = Switch(settings.switch, settings.network)
        self._next = 0

    async def run(self) -> None:
        """Be a node until this process ends."""
        await self._register()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._heartbeat())
            group.create_task(self._follow_pods())
            group.create_task(self._follow_names())
            group.create_task(serve_logs(self))

    def new_host(self) -> Host:
        """A network namespace for a pod, with an address that no other pod of this node has."""
        taken = {pod.host.address for pod in self.pods.values() if hasattr(pod, "host")}
        for _ in range(self.settings.addresses):
            number = self.settings.first_address + self._next % self.settings.addresses
            self._next += 1
            if f"{self.settings.network}.{number}" not in taken:
                return self._switch.plug_in(f"{self.settings.switch}p{number}", number, gateway=True)
        raise RuntimeError(f"the node {self.settings.name} has no free address: it has {self.settings.addresses}")

    def remove_host(self, host: Host) -> None:
        """Remove a pod's network namespace, if it is still there."""
        subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)

    def forget(self, pod: Pod) -> None:
        """Forget a pod that has ended."""
        self.pods.pop(pod.uid, None)

    async def release(self, folder: Path) -> None:
        """Unmount what is mounted below the folder of a pod."""
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for path in sorted((each for each in mounts if each.startswith(f"{folder}/")), reverse=True):
            await asyncio.to_thread(subprocess.run, ["umount", "--lazy", path], check=False)

    async def _register(self) -> None:
        settings = self.settings
        body = {
            "metadata": {"name": settings.name, "labels": {"kubernetes.io/hostname": settings.name} | settings.labels},
            "spec": {"taints": settings.taints},
        }
        while True:
            try:
                await self.api.send("POST", "/api/v1/nodes", body)
                break
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 409:
                    break
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.3)
        kinds = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
        began = now()
        status = {
            "capacity": settings.allocatable,
            "allocatable": settings.allocatable,
            "conditions": [
                {
                    "type": kind,
                    "status": value,
                    "lastHeartbeatTime": began,
                    "lastTransitionTime": began,
                    "reason": "Agent",
                }
                for kind, value in kinds.items()
            ],
            "addresses": [{"type": "InternalIP", "address": settings.address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": settings.log_port}},
            "nodeInfo": {},
        }
        await self._patch_status(status)

    async def _patch_status(self, status: dict[str, Any]) -> None:
        path = f"/api/v1/nodes/{self.settings.name}/status"
        await self.api.send_until_answered("PATCH", path, {"status": status}, MERGE)

    async def _heartbeat(self) -> None:
        """Renew the node's lease; say Ready again if the controller has taken the node for lost meanwhile."""
        name, beats = self.settings.name, 0
        while True:
            spec = {"holderIdentity": name, "leaseDurationSeconds": 20, "renewTime": now().replace("Z", ".000000Z")}
            body = {"metadata": {"name": name}, "spec": spec}
            try:
                await self.api.send("PATCH", f"{LEASES}/{name}", body, MERGE)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 404:
                    await self.api.send_until_answered("POST", LEASES, body)
            except httpx.HTTPError:
                pass
            if beats % 3 == 0:
                ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now(), "reason": "Agent"}
                await self._patch_status({"conditions": [ready]})
            beats += 1
            await asyncio.sleep(HEARTBEAT_S)

    async def _follow_pods(self) -> None:
        async for kind, found in self.api.follow("/api/v1/pods", fieldSelector=f"spec.nodeName={self.settings.name}"):
            listed = found if kind == "LIST" else [found]
            for manifest in listed:
                uid = manifest["metadata"]["uid"]
                if kind == "DELETED":
                    if uid in self.pods:
                        self.pods[uid].gone()
                    continue
                if uid not in self.pods:
                    self.pods[uid] = Pod(self, manifest)
                self.pods[uid].changed(manifest)
            if kind == "LIST":
                present = {manifest["metadata"]["uid"] for manifest in listed}
                for uid in set(self.pods) - present:
                    self.pods[uid].gone()

    async def _follow_names(self) -> None:
        async for kind, found in self.api.follow("/apis/discovery.k8s.io/v1/endpointslices"):
            self.names.changed(kind, found)
            for pod in self.pods.values():
                pod.write_hosts()
