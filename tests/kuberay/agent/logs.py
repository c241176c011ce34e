"""The endpoint from which the API server reads logs of containers."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from tests.kuberay.agent.node import Node


async def serve_logs(node: Node) -> None:
    """Answer requests for logs, by HTTPS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(node.settings.certificate, node.settings.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            await _answer(node, head.split(b" ")[1].decode(), writer)
        writer.close()

    server = await asyncio.start_server(answer, node.settings.address, node.settings.log_port, ssl=context)
    await server.serve_forever()


async def _answer(node: Node, target: str, writer: asyncio.StreamWriter) -> None:
    address = urlsplit(target)
    asked = {name: values[-1] for name, values in parse_qs(address.query).items()}
    parts = address.path.strip("/").split("/")
    container = None
    if len(parts) == 4 and parts[0] == "containerLogs":
        for pod in node.pods.values():
            about = pod.manifest["metadata"]
            if (about["namespace"], about["name"]) == (parts[1], parts[2]):
                container = next((each for each in [*pod.inits, *pod.containers] if each.name == parts[3]), None)
    log = container.log(asked.get("previous") == "true") if container else None
    if container is None or log is None or not log.exists():
        writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\nthe container has no log\n")
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n")
    content = log.read_bytes()
    shown = content
    if "tailLines" in asked:
        lines = content.splitlines(keepends=True)
        shown = b"".join(lines[len(lines) - min(int(asked["tailLines"]), len(lines)) :])
    if "limitBytes" in asked:
        shown = shown[: int(asked["limitBytes"])]
    writer.write(shown)
    await writer.drain()
    sent = len(content)
    while asked.get("follow") == "true":
        running = container.main_process() is not None
        with log.open("rb") as file:
            file.seek(sent)
            more = file.read()
        sent += len(more)
        writer.write(more)
        await writer.drain()
        if not running:
            return
        await asyncio.sleep(0.2)
