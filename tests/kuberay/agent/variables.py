"""The environment of a container, from its spec."""

from __future__ import annotations

import base64
import re
from typing import Any

import httpx

from tests.kuberay.agent.api import Api
from tests.kuberay.agent.quantities import resource_value


class ConfigError(Exception):
    """A container cannot be made, as for a Secret that is missing; the message is the kubelet's."""


async def variables(api: Api, pod: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container.

    Raises:
        ConfigError: a Secret or ConfigMap, or its key, is missing.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        kind = "secret" if "secretRef" in source else "configmap"
        reference = source.get("secretRef") or source["configMapRef"]
        data = await keys(api, pod, kind, reference["name"], reference.get("optional", False))
        found |= {source.get("prefix", "") + name: value.decode() for name, value in data.items()}
    for variable in container.get("env", ()):
        if (source := variable.get("valueFrom")) is None:
            found[variable["name"]] = expand(variable.get("value", ""), found)
        elif (value := await _value(api, pod, container, source)) is not None:
            found[variable["name"]] = value
    return found


def expand(text: str, known: dict[str, str]) -> str:
    """Replace $(NAME) by the variable's value; $$ is a dollar sign."""

    def replaced(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return known.get(match.group(1), match.group(0))

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", replaced, text)


async def keys(api: Api, pod: dict[str, Any], kind: str, name: str, optional: bool) -> dict[str, bytes]:
    """The keys of a Secret or ConfigMap with their values.

    Raises:
        ConfigError: it is missing and not optional.
    """
    plural = "secrets" if kind == "secret" else "configmaps"
    try:
        found = await api.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/{plural}/{name}")
    except httpx.HTTPStatusError as error:
        if error.response.status_code == 404 and optional:
            return {}
        raise ConfigError(f'{kind} "{name}" not found') from None
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    binary = {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
    return {key: value.encode() for key, value in (found.get("data") or {}).items()} | binary


def field(pod: dict[str, Any], path: str) -> str:
    """The value of a field of the pod, such as metadata.name or metadata.labels['app']."""
    if named := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(pod["metadata"].get(named.group(1), {}).get(named.group(2), ""))
    value: Any = pod
    for name in path.split("."):
        value = value.get(name, {})
    if path == "status.podIPs":
        return ",".join(entry["ip"] for entry in value)
    return str(value) if value != {} else ""


async def _value(api: Api, pod: dict[str, Any], container: dict[str, Any], source: dict[str, Any]) -> str | None:
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource_value(container, source["resourceFieldRef"])
    kind = "secret" if "secretKeyRef" in source else "configmap"
    reference = source.get("secretKeyRef") or source["configMapKeyRef"]
    optional = reference.get("optional", False)
    data = await keys(api, pod, kind, reference["name"], optional)
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if optional:
        return None
    name = f"{pod['metadata']['namespace']}/{reference['name']}"
    raise ConfigError(f"couldn't find key {reference['key']} in {'Secret' if kind == 'secret' else 'ConfigMap'} {name}")
