"""A real control plane on this machine, with the KubeRay operator and nodes that run pods as processes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.kuberay import build, light_ray
from tests.kuberay.agent.limits import remove_groups
from tests.kuberay.agent.settings import AgentSettings
from tests.kuberay.credentials import Credentials, make_credentials
from tests.kuberay.processes import Service, agent_command, free_port
from tests.support import ROOT
from tests.support.network_hosts import Switch, refusal, switch
from tests.support.waiting import wait_until

RAY_IMAGE = "shoal.test/ray:2.60.0"
"""The name of the image that stands for this environment."""

LIGHT_IMAGE = "shoal.test/light-ray:2.60.0"
"""The name of the image in which a stand-in for Ray starts fast (`light_ray.py`)."""

LOST_AFTER_S = 20
"""After how many seconds without a heartbeat a node is lost. A cluster has 50: too long for tests."""

EVICTED_AFTER_S = 3
"""After how many more seconds its pods are ended. A cluster has 300."""


_KUEUE = """
mkdir -p $0/upper $0/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=$0/upper,workdir=$0/work /etc
mkdir -p /etc/kueue/metrics
ln -s $1 /etc/kueue/metrics/certs
shift
exec "$@"
"""
"""Starts Kueue, which reads the certificate of its metrics from a fixed folder in /etc: this is one of its own."""


class ControlPlane:
    """The processes of a cluster. All of them live in one folder and on one bridge."""

    def __init__(self, folder: Path, bridge: Switch, credentials: Credentials) -> None:
        self.folder, self.bridge, self.credentials = folder, bridge, credentials
        self.address = f"{bridge.network}.1"
        self.server = f"https://{self.address}"
        self.services: dict[str, Service] = {}
        self.nodes: dict[str, Service] = {}
        self._images: dict[str, dict[str, Any]] = {}
        self._added = 0
        self._client: httpx.Client | None = None

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of a user who may do everything."""
        return self.credentials.kubeconfig("admin", self.server)

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Send a request as a user who may do everything, and return the answer's JSON.

        Raises:
            httpx.HTTPStatusError: it was refused.
        """
        if self._client is None:
            context = ssl.create_default_context(cafile=str(self.credentials.server_certificate))
            self._client = httpx.Client(base_url=self.server, verify=context, trust_env=False, timeout=30)
        headers = {"Authorization": f"Bearer {self.credentials.tokens['admin']}", "Content-Type": kind}
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        answer = self._client.request(method, path, content=content, headers=headers)
        answer.raise_for_status()
        return answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text

    def start(self) -> None:
        """Start everything but nodes."""
        etcd, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._serve(
            "etcd",
            str(build.ETCD.path()),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync=true",
            "--log-level=warn",
        )
        self.services["etcd"].wait_for(lambda: _answers(f"{etcd}/health"))
        self._serve("kube-apiserver", self._program("kube-apiserver"), *self._server_flags(etcd))
        self.wait_for_server()
        for crd in build.crds(build.OPERATOR):
            self._apply_crd(crd)
        self._start_controllers()
        health = f"127.0.0.1:{free_port()}"
        self._serve(
            "ray-operator",
            str(build.OPERATOR.path()),
            f"--kubeconfig={self.kubeconfig}",
            "--enable-leader-election=false",
            f"--metrics-addr=127.0.0.1:{free_port()}",
            f"--health-probe-bind-address={health}",
        )
        self.services["ray-operator"].wait_for(lambda: _answers(f"http://{health}/readyz"))
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until(lambda: self._exists(account), "the default service account")

    def start_kueue(self) -> None:
        """Start Kueue, which admits RayClusters with the label of a queue, also elastic ones."""
        if "kueue" in self.services:
            return
        for crd in build.crds(build.KUEUE):
            self._apply_crd(crd)
        port, health = free_port(self.address), f"127.0.0.1:{free_port()}"
        certificates = self._webhook_certificate()
        settings = self.folder / "kueue.json"
        settings.write_text(
            json.dumps(
                {
                    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
                    "kind": "Configuration",
                    "health": {"healthProbeBindAddress": health},
                    "metrics": {"bindAddress": "0"},
                    "webhook": {"host": self.address, "port": port, "certDir": str(certificates)},
                    "leaderElection": {"leaderElect": False},
                    "internalCertManagement": {"enable": False},
                    "integrations": {"frameworks": ["ray.io/raycluster"]},
                }
            )
        )
        self._serve(
            "kueue",
            *("unshare", "--mount", "sh", "-c", _KUEUE, str(self.folder / "kueue-etc"), str(certificates)),
            str(build.KUEUE.path()),
            f"--config={settings}",
            f"--kubeconfig={self.kubeconfig}",
            "--feature-gates=ElasticJobsViaWorkloadSlices=true,VisibilityOnDemand=false",
        )
        self.services["kueue"].wait_for(lambda: _answers(f"http://{health}/readyz"))
        authority = base64.b64encode(self.credentials.server_certificate.read_bytes()).decode()
        for kind, action in (("mutating", "mutate"), ("validating", "validate")):
            hook = {
                "name": f"{action}.kueue.test",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "clientConfig": {
                    "url": f"https://{self.address}:{port}/{action}-ray-io-v1-raycluster",
                    "caBundle": authority,
                },
                "rules": [
                    {
                        "apiGroups": ["ray.io"],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"] if kind == "mutating" else ["CREATE", "UPDATE"],
                        "resources": ["rayclusters"],
                    }
                ],
            }
            body = {
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": f"{kind.title()}WebhookConfiguration",
                "metadata": {"name": "kueue"},
                "webhooks": [hook],
            }
            self.request("POST", f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations", body)

    def _webhook_certificate(self) -> Path:
        """Return a folder with the server's certificate under the names that Kueue expects."""
        folder = self.folder / "kueue-certificates"
        folder.mkdir()
        (folder / "tls.crt").symlink_to(self.credentials.server_certificate)
        (folder / "tls.key").symlink_to(self.credentials.server_key)
        return folder

    def _start_controllers(self) -> None:
        certificates = self.credentials.folder
        shared = ["--leader-elect=false", "--bind-address=127.0.0.1", f"--cert-dir={certificates}"]
        self._serve(
            "kube-controller-manager",
            self._program("kube-controller-manager"),
            *shared,
            f"--secure-port={free_port()}",
            f"--kubeconfig={self.credentials.kubeconfig('controller-manager', self.server)}",
            f"--service-account-private-key-file={self.credentials.account_key}",
            f"--root-ca-file={self.credentials.server_certificate}",
            "--use-service-account-credentials=true",
            "--node-monitor-period=1s",
            f"--node-monitor-grace-period={LOST_AFTER_S}s",
            "--node-eviction-rate=10",
        )
        self._serve(
            "kube-scheduler",
            self._program("kube-scheduler"),
            *shared,
            f"--secure-port={free_port()}",
            f"--kubeconfig={self.credentials.kubeconfig('scheduler', self.server)}",
        )

    def wait_for_server(self) -> None:
        """Wait until the API server is ready."""

        def ready() -> bool:
            with suppress(httpx.HTTPError, OSError):
                return self.request("GET", "/readyz") == "ok"
            return False

        self.services["kube-apiserver"].wait_for(ready)

    def add_image(self, name: str, environment: Path, visible: list[Path], **variables: str) -> None:
        """Let an environment of Python stand for an image; `visible`: folders below /tmp that its containers see."""
        self._images[name] = {
            "environment": str(environment),
            "visible": [str(path) for path in visible],
            "variables": variables,
        }
        self._write_images()

    def _write_images(self) -> None:
        unfinished = self.folder / "images.unfinished"
        unfinished.write_text(json.dumps(self._images))
        unfinished.rename(self.folder / "images.json")

    def add_light_image(self) -> None:
        """Let the stand-in for Ray be an image, again if it was removed."""
        command = self.folder / "light-ray" / "bin" / "ray"
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {Path(light_ray.__file__)} "$@"\n')
        command.chmod(0o755)
        self.add_image(LIGHT_IMAGE, command.parent.parent, [ROOT])

    def remove_image(self, name: str) -> None:
        """Let an image be in no registry: containers that start from now on cannot pull it."""
        del self._images[name]
        self._write_images()

    def add_node(
        self,
        name: str,
        cpu: str = "4",
        memory: str = "8Gi",
        labels: dict[str, str] | None = None,
        taints: list[dict[str, str]] | None = None,
        pods: int = 20,
    ) -> None:
        """Start a node, and wait until pods can be scheduled on it."""
        number = self._added
        self._added += 1
        assert number < 6, "the network has addresses for six nodes"
        settings = AgentSettings(
            name=name,
            server=self.server,
            token=self.credentials.tokens["node"],
            authority=str(self.credentials.server_certificate),
            certificate=str(self.credentials.server_certificate),
            key=str(self.credentials.server_key),
            switch=self.bridge.namespace,
            network=self.bridge.network,
            first_address=10 + 40 * number,
            addresses=40,
            log_port=free_port(self.address),
            folder=str(self.folder / name),
            images=str(self.folder / "images.json"),
            allocatable={"cpu": cpu, "memory": memory, "pods": str(pods), "ephemeral-storage": "20Gi"},
            labels=labels or {},
            taints=taints or [],
        )
        file = self.folder / f"{name}.json"
        settings.write(file)
        agent = Service(name, agent_command(file), self.folder / f"{name}.log")
        self.nodes[name] = agent
        agent.start()
        agent.wait_for(lambda: self._schedulable(name))

    def remove_node(self, name: str) -> None:
        """Let a node lose its power: its processes are gone, and nobody tells the API server."""
        self.nodes[name].kill()

    def stop(self) -> None:
        """End everything that was started."""
        for node in self.nodes.values():
            node.kill()
        for service in reversed(self.services.values()):
            service.stop()
        if self._client:
            self._client.close()
        remove_groups(self.bridge.namespace)

    def _serve(self, name: str, *command: str) -> None:
        self.services[name] = service = Service(name, list(command), self.folder / f"{name}.log")
        service.start()

    def _program(self, name: str) -> str:
        link = self.folder / name
        if not link.exists():
            link.symlink_to(build.KUBERNETES.path())
        return str(link)

    def _server_flags(self, etcd: str) -> list[str]:
        keys = self.credentials
        return [
            f"--etcd-servers={etcd}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            "--secure-port=443",
            f"--tls-cert-file={keys.server_certificate}",
            f"--tls-private-key-file={keys.server_key}",
            "--service-cluster-ip-range=198.19.0.0/24",
            f"--token-auth-file={keys.token_file}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={keys.account_public_key}",
            f"--service-account-signing-key-file={keys.account_key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--default-not-ready-toleration-seconds={EVICTED_AFTER_S}",
            f"--default-unreachable-toleration-seconds={EVICTED_AFTER_S}",
        ]

    def _apply_crd(self, file: Path) -> None:
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{_crd_name(file)}"
        self.request(
            "PATCH", f"{path}?fieldManager=tests&force=true", file.read_bytes(), "application/apply-patch+yaml"
        )

        def established() -> bool:
            conditions = self.request("GET", path)["status"].get("conditions") or ()
            return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)

        wait_until(established, f"the resource type of {file.name}")

    def _exists(self, path: str) -> bool:
        with suppress(httpx.HTTPStatusError):
            return bool(self.request("GET", path))
        return False

    def _schedulable(self, name: str) -> bool:
        with suppress(httpx.HTTPStatusError):
            node = self.request("GET", f"/api/v1/nodes/{name}")
            conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", ())}
            own = [taint["key"] for taint in node["spec"].get("taints", ()) if "node.kubernetes.io" in taint["key"]]
            return conditions.get("Ready") == "True" and not own
        return False


def lacking() -> str | None:
    """What nodes lack here; None if they can run."""
    if os.geteuid():
        return "nodes need root: they make network namespaces and mounts"
    for command in ("setpriv", "unshare", "nsenter", "pivot_root"):
        if shutil.which(command) is None:
            return f"there is no `{command}` command (util-linux)"
    return refusal()


def missing() -> str | None:
    """Why there can be no control plane here; None where there can."""
    return lacking() or build.missing()


@contextmanager
def control_plane(nodes: int = 2) -> Iterator[ControlPlane]:
    """A cluster with nodes `node-0`, `node-1`, …; nothing of it is left afterwards.

    Args:
        nodes: How many nodes; `ControlPlane.add_node` adds others.
    """
    folder = Path(tempfile.mkdtemp(prefix="shoal-kuberay-"))
    try:
        with switch() as bridge:
            plane = ControlPlane(folder, bridge, make_credentials(folder / "credentials", f"{bridge.network}.1"))
            try:
                plane.add_image(
                    RAY_IMAGE,
                    Path(sys.prefix),
                    [ROOT],
                    RAY_USAGE_STATS_ENABLED="0",
                    PYTHONUNBUFFERED="1",
                )
                plane.add_light_image()
                plane.start()
                for number in range(nodes):
                    plane.add_node(f"node-{number}")
                yield plane
            finally:
                plane.stop()
    finally:
        if kept := os.environ.get("SHOAL_TEST_KEEP_LOGS"):
            _keep_logs(folder, Path(kept))
        shutil.rmtree(folder)


def _keep_logs(folder: Path, kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for log in folder.rglob("*.log"):
        target = kept / str(log.relative_to(folder)).replace("/", "_")
        shutil.copyfile(log, target)


def _crd_name(file: Path) -> str:
    group, _, plural = file.stem.partition("_")
    return f"{plural}.{group}"


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False, timeout=5).is_success
    return False
