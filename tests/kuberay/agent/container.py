"""One container: its processes, its states, its restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kuberay.agent import probes
from tests.kuberay.agent.api import now
from tests.kuberay.agent.quantities import memory_limit
from tests.kuberay.agent.settings import Image
from tests.kuberay.agent.variables import ConfigError, expand, variables

if TYPE_CHECKING:
    from tests.kuberay.agent.pod import Pod

START = Path(__file__).with_name("container_start.py")
SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FIRST_BACKOFF_S, MOST_BACKOFF_S = 2.0, 20.0
"""A kubelet waits for 10 s at first and 300 s at most: too long for tests."""

LOGGED_BYTES = 2048
"""How much of a log a kubelet takes as the termination message, if asked to."""


class Container:
    """A container of a pod, through all its restarts."""

    def __init__(self, pod: Pod, spec: dict[str, Any], init: bool) -> None:
        self.pod, self.spec, self.init = pod, spec, init
        self.name: str = spec["name"]
        self.state: dict[str, Any] = {"waiting": {"reason": "PodInitializing" if pod.inits else "ContainerCreating"}}
        self.last_state: dict[str, Any] = {}
        self.restarts = 0
        self.ready = self.started = False
        self.code: int | None = None  # of the last run; None while it runs or has not run
        self.killed_for: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._failures = 0
        self._ended = -1  # the number of the last run before a restart

    @property
    def folder(self) -> Path:
        """Files of this container."""
        return self.pod.folder / "containers" / self.name

    def log(self, previous: bool = False) -> Path:
        """The log of the run that the status shows, or of the last run that has ended before a restart."""
        return self.pod.logs / self.name / f"{self._ended if previous else self.restarts}.log"

    def status(self) -> dict[str, Any]:
        """What the API shows of it."""
        return {
            "name": self.name,
            "image": self.spec["image"],
            "imageID": f"local://{self.spec['image']}" if "waiting" not in self.state else "",
            "containerID": f"process://{self.pod.uid}/{self.name}/{self.restarts}" if self._process else "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self.state,
            "lastState": self.last_state,
        }

    async def run(self) -> int:
        """Run it, again after each end for which its pod asks so; return the last exit code."""
        while True:
            self.code = await self._run_once()
            policy = self.pod.manifest["spec"].get("restartPolicy", "Always")
            again = (policy == "Always" and not self.init) or (policy != "Never" and self.code != 0)
            if self.pod.ending or not again:
                return self.code
            self._failures += 1
            delay = min(FIRST_BACKOFF_S * 2 ** (self._failures - 1), MOST_BACKOFF_S)
            self.last_state, self._ended = self.state, self.restarts
            about = self.pod.manifest["metadata"]
            name = f"container={self.name} pod={about['name']}_{about['namespace']}({self.pod.uid})"
            message = f"back-off {delay:.0f}s restarting failed {name}"
            await self.pod.event(
                "Warning", "BackOff", f"Back-off restarting failed container {self.name} in pod {about['name']}"
            )
            await self._wait("CrashLoopBackOff", message, delay)
            self.restarts += 1

    async def execute(self, command: list[str]) -> tuple[int, str]:
        """Run a command in the container; its exit code and output."""
        inside = self.main_process()
        if inside is None:
            return 1, "the container does not run"
        environment = json.loads((self.folder / "start.json").read_text())["environment"]
        entered = ["nsenter", "--target", str(inside), "--all", "--", *command]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *entered, env=environment, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode or 0, output.decode(errors="replace")

    def main_process(self) -> int | None:
        """The process of this machine that is process 1 of the container; None if there is none."""
        if self._process is None or self._process.returncode is not None:
            return None
        pid = self._process.pid
        with suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    async def stop(self, grace: float) -> None:
        """Ask the command to end, and kill what is left after the grace period."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                if command := self.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command"):
                    await self.execute(command)
                self._signal(signal.SIGTERM)
                await process.wait()
        if process.returncode is None:
            self.kill()
            await process.wait()

    def kill(self, reason: str | None = None) -> None:
        """Kill the command, and with it all processes of the container; `reason` is what its status gives."""
        self.killed_for = reason
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if (inside := self.main_process()) is not None:
            with suppress(ProcessLookupError):
                os.kill(inside, number)

    async def _run_once(self) -> int:
        image = await self._pull()
        began = await self._start(image)
        assert self._process is not None
        watched = [asyncio.create_task(self._probe())]
        try:
            code = await self._process.wait()
        finally:
            for task in watched:
                task.cancel()
        if code < 0:  # the agent's child was killed, and not the command
            code = 128 - code
        self.ready = self.started = False
        reason = self.killed_for or (
            "OOMKilled" if code and self._out_of_memory() else "Completed" if code == 0 else "Error"
        )
        self.killed_for = None
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        if code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            ended["message"] = self.log().read_bytes()[-LOGGED_BYTES:].decode(errors="replace")
        self.state = {"terminated": ended}
        await self.pod.publish()
        return code

    async def _pull(self) -> Image:
        name, attempt = self.spec["image"], 0
        while (image := Image.find(self.pod.node.settings.images, name)) is None:
            error = f'failed to pull and unpack image "{name}": failed to resolve reference "{name}": {name}: not found'
            if not attempt:
                await self.pod.event("Warning", "Failed", f'Failed to pull image "{name}": {error}')
                await self._wait("ErrImagePull", error, 1)
            await self._wait("ImagePullBackOff", f'Back-off pulling image "{name}": ErrImagePull: {error}', 1)
            attempt += 1
        return image

    async def _start(self, image: Image) -> str:
        while True:
            try:
                told = await self._told(image)
                break
            except ConfigError as error:
                await self.pod.event("Warning", "Failed", f"Error: {error}")
                await self._wait("CreateContainerConfigError", str(error), 1)
        file = self.folder / "start.json"
        file.write_text(json.dumps(told))
        file.chmod(0o600)
        log = self.log()
        log.parent.mkdir(parents=True, exist_ok=True)
        started = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self.pod.host.namespace}"]
        started += [sys.executable, "-I", "-S", str(START), str(file)]
        with log.open("ab") as output:
            quiet = asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(*started, stdin=quiet, stdout=output, stderr=output)
        began = now()
        self.state = {"running": {"startedAt": began}}
        self.started = "startupProbe" not in self.spec
        self.ready = self.started and "readinessProbe" not in self.spec
        await self.pod.publish()
        return began

    async def _told(self, image: Image) -> dict[str, Any]:
        pod, settings = self.pod, self.pod.node.settings
        environment = {
            "PATH": f"{image.environment}/bin:{SEARCHED}",
            "HOSTNAME": pod.manifest["metadata"]["name"],
            "HOME": "/home/ray",
            "LANG": "C.UTF-8",
            "KUBERNETES_SERVICE_HOST": settings.address,
            "KUBERNETES_SERVICE_PORT": "443",
            "KUBERNETES_SERVICE_PORT_HTTPS": "443",
            **image.variables,
        }
        environment |= await variables(pod.node.api, pod.seen(), self.spec)
        command = [*self.spec.get("command", ()), *self.spec.get("args", ())]
        if not command:
            raise ConfigError("images of the tests have no command: the container must name one")
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp").chmod(0o1777)
        (self.folder / "layers").mkdir(exist_ok=True)
        mounts = [{"source": str(pod.folder / "hosts"), "target": "/etc/hosts", "read_only": False}]
        mounts.append({"source": str(pod.folder / "resolv.conf"), "target": "/etc/resolv.conf", "read_only": False})
        # A mount below another one comes after it.
        for mount in sorted(self.spec.get("volumeMounts", ()), key=lambda mount: mount["mountPath"]):
            source = pod.volumes[mount["name"]] / mount.get("subPath", "")
            mounts.append(
                {"source": str(source), "target": mount["mountPath"], "read_only": mount.get("readOnly", False)}
            )
        return {
            "environment": environment,
            "command": [expand(word, environment) for word in command],
            "working_folder": self.spec.get("workingDir", "/home/ray"),
            "hostname": pod.manifest["metadata"]["name"][:63],
            "layers": str(self.folder / "layers"),
            "temp": str(self.folder / "tmp"),
            "visible": list(image.visible),
            "image": image.environment,
            "mounts": mounts,
            "cgroup": pod.node.limits.make(f"{pod.uid}-{self.name}", memory_limit(self.spec)),
        }

    async def _probe(self) -> None:
        """Follow the probes: the startup probe first, then the two others."""
        if probe := self.spec.get("startupProbe"):
            started = asyncio.Event()

            async def starting(outcome: probes.Outcome) -> None:
                if outcome.passed:
                    started.set()
                else:
                    await self._restart("Startup", outcome)

            following = asyncio.create_task(self._follow(probe, starting))
            try:
                await started.wait()
            finally:
                following.cancel()
            self.started = True
            self.ready = "readinessProbe" not in self.spec
            await self.pod.publish()

        async def readiness(outcome: probes.Outcome) -> None:
            if self.ready != outcome.passed:
                self.ready = outcome.passed
                await self.pod.publish()
            if not outcome.passed:
                await self.pod.event("Warning", "Unhealthy", f"Readiness probe failed: {outcome.reason}")

        async def liveness(outcome: probes.Outcome) -> None:
            if not outcome.passed:
                await self._restart("Liveness", outcome)

        async with asyncio.TaskGroup() as group:
            for name, changed in (("readinessProbe", readiness), ("livenessProbe", liveness)):
                if probe := self.spec.get(name):
                    group.create_task(self._follow(probe, changed))

    async def _follow(self, probe: dict[str, Any], changed: Any) -> None:
        await probes.follow(probe, self.pod.host.address, self.spec, self.execute, changed)

    async def _restart(self, which: str, outcome: probes.Outcome) -> None:
        await self.pod.event("Warning", "Unhealthy", f"{which} probe failed: {outcome.reason}")
        message = f"Container {self.name} failed {which.lower()} probe, will be restarted"
        await self.pod.event("Normal", "Killing", message)
        # The end of the process cancels this task: the stop must go on.
        self._stopping = asyncio.create_task(self.stop(self.pod.grace()))
        await asyncio.shield(self._stopping)

    def _out_of_memory(self) -> bool:
        return self.pod.node.limits.exceeded(f"{self.pod.uid}-{self.name}")

    async def _wait(self, reason: str, message: str, seconds: float) -> None:
        self.state = {"waiting": {"reason": reason, "message": message}}
        await self.pod.publish()
        await asyncio.sleep(seconds)
