"""The volumes of a pod as folders of this machine."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from tests.kuberay.agent.api import Api
from tests.kuberay.agent.quantities import number
from tests.kuberay.agent.variables import ConfigError, field, keys, resource_value


async def make(api: Api, pod: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Make the volumes of a pod, by name. May be called again after an error.

    Raises:
        ConfigError: a volume cannot be made now.
    """
    made: dict[str, Path] = {}
    for volume in pod["spec"].get("volumes", ()):
        name = volume["name"]
        made[name] = path = folder / name
        if "hostPath" in volume:
            made[name] = Path(volume["hostPath"]["path"])
        elif "emptyDir" in volume:
            _make_empty(path, volume["emptyDir"])
        else:
            path.mkdir(parents=True, exist_ok=True)
            try:
                await _fill(api, pod, volume, path)
            except ConfigError as error:
                raise ConfigError(f'MountVolume.SetUp failed for volume "{name}" : {error}') from None
    return made


async def renew_tokens(api: Api, pod: dict[str, Any], made: dict[str, Path]) -> None:
    """Write new service account tokens into the projected volumes, in place, before the old ones expire."""
    lives = [
        source["serviceAccountToken"].get("expirationSeconds", 3600)
        for volume in pod["spec"].get("volumes", ())
        for source in volume.get("projected", {}).get("sources", ())
        if "serviceAccountToken" in source
    ]
    while lives:
        await asyncio.sleep(min(lives) * 0.8)
        for volume in pod["spec"]["volumes"]:
            if "projected" in volume:
                await _fill(api, pod, volume, made[volume["name"]])


def _make_empty(path: Path, source: dict[str, Any]) -> None:
    if path.exists():
        return
    path.mkdir(parents=True)
    path.chmod(0o777)
    if source.get("medium") == "Memory":
        # It is mounted in the agent's own namespace, and so it is gone with the last process of the node.
        size = int(number(str(source.get("sizeLimit", "1Gi"))))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)


async def _fill(api: Api, pod: dict[str, Any], volume: dict[str, Any], path: Path) -> None:
    if "secret" in volume:
        sources = [{"secret": volume["secret"] | {"name": volume["secret"]["secretName"]}}]
    elif "configMap" in volume:
        sources = [{"configMap": volume["configMap"]}]
    elif "downwardAPI" in volume:
        sources = [{"downwardAPI": volume["downwardAPI"]}]
    elif "projected" in volume:
        sources = volume["projected"]["sources"]
    else:
        kind = next(key for key in volume if key != "name")
        raise ConfigError(f"nodes of the tests have no volumes of the kind {kind}")
    for source in sources:
        for name, content in (await _files(api, pod, source)).items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


async def _files(api: Api, pod: dict[str, Any], source: dict[str, Any]) -> dict[str, bytes]:
    [(kind, detail)] = source.items()
    if kind == "serviceAccountToken":
        return {detail["path"]: await _token(api, pod, detail)}
    if kind == "downwardAPI":
        return {item["path"]: _downward(pod, item).encode() for item in detail.get("items", ())}
    data = await keys(api, pod, kind.lower(), detail["name"], detail.get("optional", False))
    if items := detail.get("items"):
        absent = [item["key"] for item in items if item["key"] not in data]
        if absent and not detail.get("optional", False):
            raise ConfigError(f"references non-existent {kind.lower()} key: {absent[0]}")
        return {item["path"]: data[item["key"]] for item in items if item["key"] in data}
    return data


def _downward(pod: dict[str, Any], item: dict[str, Any]) -> str:
    if "fieldRef" in item:
        return field(pod, item["fieldRef"]["fieldPath"])
    reference = item["resourceFieldRef"]
    container = next(each for each in pod["spec"]["containers"] if each["name"] == reference["containerName"])
    return resource_value(container, reference)


async def _token(api: Api, pod: dict[str, Any], detail: dict[str, Any]) -> bytes:
    about, account = pod["metadata"], pod["spec"].get("serviceAccountName", "default")
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [detail["audience"]] if "audience" in detail else [],
            "expirationSeconds": detail.get("expirationSeconds", 3600),
            "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": about["name"], "uid": about["uid"]},
        },
    }
    path = f"/api/v1/namespaces/{about['namespace']}/serviceaccounts/{account}/token"
    answer = await api.send("POST", path, body)
    return answer["status"]["token"].encode()
