"""The part of the API of Kubernetes that a node needs."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx

MERGE = "application/strategic-merge-patch+json"


class Api:
    """Requests to the API server, with the token of the node."""

    def __init__(self, server: str, token: str, authority: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=server,
            headers={"Authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=authority),
            timeout=httpx.Timeout(10, read=20),
            trust_env=False,
        )

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The object or the list at the path."""
        return await self.send("GET", path, params=params)

    async def send(self, method: str, path: str, body: Any = None, kind: str = "application/json", **more: Any) -> Any:
        """Send a request and return the answer; httpx.HTTPStatusError if it is refused."""
        content = None if body is None else json.dumps(body)
        answer = await self._client.request(method, path, content=content, headers={"Content-Type": kind}, **more)
        answer.raise_for_status()
        return answer.json()

    async def send_until_answered(self, method: str, path: str, body: Any, kind: str = "application/json") -> Any:
        """Send a request, again and again while the API server is away; None if it is refused."""
        while True:
            try:
                return await self.send(method, path, body, kind)
            except httpx.HTTPStatusError as error:
                if (code := error.response.status_code) not in (429, 500, 503):
                    # The object may be gone (404), or another one of its name (409): anything else is an error of ours.
                    if code not in (404, 409):
                        print(f"{method} {path} is refused with {code}: {error.response.text}", flush=True)
                    return None
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.5)

    async def follow(self, path: str, **params: Any) -> AsyncIterator[tuple[str, Any]]:
        """All objects as ("LIST", objects), then each change as (type, object); a list again after an interruption."""
        while True:
            try:
                listed = await self.get(path, **params)
                yield "LIST", listed["items"]
                watch = params | {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
                timeout = httpx.Timeout(10, read=None)
                async with self._client.stream("GET", path, params=watch, timeout=timeout) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        yield event["type"], event["object"]
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.3)

    async def record(self, pod: dict[str, Any], kind: str, reason: str, message: str, node: str) -> None:
        """Record an event about a pod."""
        about = pod["metadata"]
        body = {
            "metadata": {"generateName": f"{about['name']}.", "namespace": about["namespace"]},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": about["name"],
                "namespace": about["namespace"],
                "uid": about["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": node},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        await self.send_until_answered("POST", f"/api/v1/namespaces/{about['namespace']}/events", body)


def now() -> str:
    """This instant as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
