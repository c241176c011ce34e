"""Probes of containers: HTTP, TCP and commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

Run = Callable[[list[str]], Awaitable[tuple[int, str]]]


@dataclass
class Outcome:
    """What the last attempt of a probe has shown."""

    passed: bool
    reason: str = ""


async def follow(
    probe: dict[str, Any],
    address: str,
    container: dict[str, Any],
    run: Run,
    changed: Callable[[Outcome], Awaitable[None]],
) -> None:
    """Try a probe in its period until this is cancelled; report each attempt that reaches a threshold."""
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    passed = failed = 0
    while True:
        outcome = await attempt(probe, address, container, run)
        passed, failed = (passed + 1, 0) if outcome.passed else (0, failed + 1)
        if passed >= probe.get("successThreshold", 1) or failed >= probe.get("failureThreshold", 3):
            await changed(outcome)
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def attempt(probe: dict[str, Any], address: str, container: dict[str, Any], run: Run) -> Outcome:
    """Try a probe once."""
    timeout = probe.get("timeoutSeconds", 1)
    try:
        async with asyncio.timeout(timeout):
            if http := probe.get("httpGet"):
                return await _get(http, address, container)
            if tcp := probe.get("tcpSocket"):
                _, writer = await asyncio.open_connection(tcp.get("host") or address, port(tcp["port"], container))
                writer.close()
                return Outcome(True)
            code, output = await run(probe["exec"]["command"])
            return Outcome(code == 0, output)
    except TimeoutError:
        return Outcome(False, f"no answer within {timeout} s")
    except (httpx.HTTPError, OSError) as error:
        return Outcome(False, f"{type(error).__name__}: {error}")


def port(named: int | str, container: dict[str, Any]) -> int:
    """The number of a port that a probe names."""
    if isinstance(named, int):
        return named
    numbers = {each.get("name"): each["containerPort"] for each in container.get("ports", ())}
    return int(numbers.get(named, named))


async def _get(http: dict[str, Any], address: str, container: dict[str, Any]) -> Outcome:
    place = f"{http.get('host') or address}:{port(http['port'], container)}"
    url = f"{http.get('scheme', 'HTTP').lower()}://{place}{http.get('path', '/')}"
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        headers = {header["name"]: header["value"] for header in http.get("httpHeaders", ())}
        answer = await client.get(url, headers=headers)
    return Outcome(answer.status_code < 400, f"HTTP probe failed with statuscode: {answer.status_code}")
