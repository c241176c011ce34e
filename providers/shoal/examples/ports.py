"""Ports for servers that bind them a while later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_LOWEST = 20_000
"""Ray gives its workers the ports 10002 to 19999 by default."""

_TRIES = 100


def free_port() -> int:
    """Find a loopback port that is free, and that the kernel gives to no other process until a server binds it.

    Ports of the kernel's own range do not stay free: a server binds its port seconds later, and by then hundreds of
    connections of other processes may have been given one.
    """
    first, last = map(int, _KERNELS_RANGE.read_text().split())
    outside = [port for port in range(_LOWEST, 65_536) if not first <= port <= last]
    for port in random.SystemRandom().sample(outside, min(_TRIES, len(outside))):
        if _is_free(port):
            return port
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
