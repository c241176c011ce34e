"""The node agent as a process, with the API of `node_api.py`: what it does with pods, and that it leaves nothing."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.kuberay import light_ray
from tests.kuberay.agent.limits import remove_groups
from tests.kuberay.agent.pod import ORDER
from tests.kuberay.agent.settings import AgentSettings
from tests.kuberay.control_plane import lacking
from tests.kuberay.credentials import make_credentials
from tests.kuberay.manifests import pod
from tests.kuberay.node_api import NodeApi
from tests.kuberay.processes import Service, agent_command, free_port
from tests.support import ROOT
from tests.support.network_hosts import switch
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.processes]

ENVIRONMENT = "here:1"
LIGHT_RAY = "ray:1"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeApi, AgentSettings]]:
    if reason := lacking():
        pytest.skip(reason)
    tmp_path = tmp_path_factory.mktemp("node")
    api = NodeApi()
    command = tmp_path / "light" / "bin" / "ray"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {light_ray.__file__} "$@"\n')
    command.chmod(0o755)
    images = {
        ENVIRONMENT: {"environment": sys.prefix, "visible": [str(ROOT)], "variables": {"FROM_IMAGE": "yes"}},
        LIGHT_RAY: {"environment": str(command.parent.parent), "visible": [str(ROOT)], "variables": {}},
    }
    (tmp_path / "images.json").write_text(json.dumps(images))
    with switch() as bridge:
        address = f"{bridge.network}.1"
        credentials = make_credentials(tmp_path / "credentials", address)
        settings = AgentSettings(
            name="node",
            server=api.url,
            token="none",
            authority=str(credentials.server_certificate),
            certificate=str(credentials.server_certificate),
            key=str(credentials.server_key),
            switch=bridge.namespace,
            network=bridge.network,
            first_address=10,
            addresses=20,
            log_port=free_port(address),
            folder=str(tmp_path / "node"),
            images=str(tmp_path / "images.json"),
            allocatable={"cpu": "2"},
        )
        settings.write(tmp_path / "settings.json")
        agent = Service("node", agent_command(tmp_path / "settings.json"), tmp_path / "agent.log")
        agent.start()
        try:
            agent.wait_for(lambda: bool(api.node and api.node.get("status") and api.leases))
            yield api, settings
        finally:
            agent.kill()
            api.close()
            remove_groups(bridge.namespace)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert bridge.namespace not in left
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


def status_of(api: NodeApi, name: str, condition: Any, what: str) -> dict[str, Any]:
    return wait_until(lambda: (seen := api.seen.get(name)) and condition(seen) and seen, f"{name}: {what}", seconds=120)


def ready(seen: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in seen["conditions"])


def reason(seen: dict[str, Any]) -> str | None:
    [state] = seen["containerStatuses"][0]["state"].values()
    return state.get("reason")


def log(settings: AgentSettings, name: str, **query: str) -> str:
    url = f"https://{settings.address}:{settings.log_port}/containerLogs/default/{name}/main"
    return httpx.get(url, params=query, verify=False, trust_env=False, timeout=30).text


def test_pods_run_with_their_variables_volumes_names_and_probes_and_end_in_their_grace(node: Any):
    api, settings = node
    api.secrets["word"] = {"it": base64.b64encode(b"open sesame").decode()}
    command = (
        'echo "$WORD, $FROM_IMAGE, $ADDRESS, $(hostname), $(cat /secrets/token), $(ls /tmp/)"; touch /var/written; '
        "until getent hosts friend; do sleep 0.05; done; touch /ready; trap 'echo ended; exit 0' TERM; "
        "while true; do sleep 0.05; done"
    )
    manifest = pod("asker", ENVIRONMENT, command)
    manifest["spec"]["initContainers"] = [
        {
            "name": "first",
            "image": ENVIRONMENT,
            "command": ["/bin/sh", "-c", "exit $FAILS"],
            "env": [{"name": "FAILS", "value": "0"}],
        }
    ]
    manifest["spec"]["volumes"] = [
        {"name": "tokens", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
    ]
    manifest["spec"]["containers"][0] |= {
        "env": [
            {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "word", "key": "it"}}},
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "volumeMounts": [{"name": "tokens", "mountPath": "/secrets", "readOnly": True}],
        "readinessProbe": {"exec": {"command": ["test", "-e", "/ready"]}, "periodSeconds": 0.1, "timeoutSeconds": 10},
    }
    api.create_pod(manifest)

    running = status_of(api, "asker", lambda seen: reason(seen) is None, "running")
    assert not ready(running)
    api.publish_service("friend", "198.18.255.1")
    address = status_of(api, "asker", ready, "ready")["podIP"]

    visible = ROOT.parts[2] if ROOT.parts[1] == "tmp" else ""
    first = f"open sesame, yes, {address}, asker, token of asker, {visible}"
    assert log(settings, "asker").splitlines()[0] == first
    assert log(settings, "asker", tailLines="1").startswith("198.18.255.1")
    assert not Path("/var/written").exists()

    api.change_pod("asker", deletionTimestamp="now", deletionGracePeriodSeconds=60)
    wait_until(lambda: "asker" not in api.pods, "the end of the pod")
    assert api.seen["asker"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 0


def test_faults_are_shown_as_kubernetes_shows_them(node: Any):
    api, settings = node
    hungry = pod("hungry", ENVIRONMENT, "exec python -S -c 'bytearray(300 << 20)'")
    hungry["spec"]["containers"][0]["resources"] = {"limits": {"memory": "100Mi"}}
    lacks = pod("lacks", ENVIRONMENT, "true")
    lacks["spec"]["containers"][0]["env"] = [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "no", "key": "x"}}}]
    unmounted = pod("unmounted", ENVIRONMENT, "true", volumes=[{"name": "v", "secret": {"secretName": "no"}}])
    for manifest in (
        pod("lost", "nobody/has:1", "true"),
        hungry,
        pod("crash", ENVIRONMENT, "echo the cause; exit 3", restartPolicy="Always"),
        lacks,
        unmounted,
        pod("evicted", ENVIRONMENT, "exec sleep infinity"),
    ):
        api.create_pod(manifest)

    pulled = status_of(api, "lost", lambda seen: reason(seen) == "ImagePullBackOff", "back-off")
    assert "nobody/has:1: not found" in pulled["containerStatuses"][0]["state"]["waiting"]["message"]
    killed = status_of(api, "hungry", lambda seen: seen["phase"] == "Failed", "killed")
    assert (
        killed["containerStatuses"][0]["state"]["terminated"] | {"reason": "OOMKilled", "exitCode": 137}
        == (killed["containerStatuses"][0]["state"]["terminated"])
    )
    crashed = status_of(api, "crash", lambda seen: reason(seen) == "CrashLoopBackOff", "back-off")
    assert crashed["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 3
    assert log(settings, "crash", previous="true") == "the cause\n"
    status_of(api, "lacks", lambda seen: reason(seen) == "CreateContainerConfigError", "missing Secret")
    said = 'MountVolume.SetUp failed for volume "v" : secret "no" not found'
    wait_until(lambda: ("FailedMount", said) in api.events, "the event of the mount")

    status_of(api, "evicted", ready, "ready")
    api.change_pod("evicted", annotations={ORDER: "evict"})
    evicted = status_of(api, "evicted", lambda seen: seen["phase"] == "Failed", "evicted")
    assert evicted["reason"] == "Evicted"
    assert any(each["type"] == "DisruptionTarget" for each in evicted["conditions"])


def test_a_worker_of_another_pod_joins_the_head_by_the_name_of_its_service(node: Any):
    api, _ = node
    api.create_pod(pod("head", LIGHT_RAY, "ray start --head --num-cpus=0", terminationGracePeriodSeconds=30))
    head = status_of(api, "head", ready, "ready")["podIP"]
    api.publish_service("ray-head-svc", head)
    waits = {"name": "wait", "image": LIGHT_RAY, "command": ["/bin/bash", "-c"]}
    waits["args"] = ["until ray health-check --address ray-head-svc:6379; do sleep 0.1; done"]
    api.create_pod(
        pod("worker", LIGHT_RAY, "ray start --address=ray-head-svc:6379 --num-cpus=1", initContainers=[waits])
    )
    worker = status_of(api, "worker", ready, "ready")["podIP"]

    def nodes() -> set[str]:
        answer = httpx.get(f"http://{head}:8265/api/v0/nodes", trust_env=False, timeout=30).json()
        return {each["node_ip"] for each in answer["data"]["result"]["result"]}

    wait_until(lambda: nodes() == {head, worker}, "both nodes")
    api.change_pod("worker", deletionTimestamp="now", deletionGracePeriodSeconds=30)
    wait_until(lambda: nodes() == {head}, "the worker to leave")
