"""Find a free port for a server that is started later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_LOWEST = 20_000
"""Lowest port to use. Ray's workers use the ports 10002 to 19999 by default."""

_TRIES = 100


def free_port() -> int:
    """Return a free loopback port, if possible outside the ephemeral range, from which the kernel assigns ports.

    A port in the ephemeral range may not stay free: the server binds it seconds later, and in the meantime the kernel
    may assign it to one of hundreds of connections of other processes.
    """
    first, last = map(int, _EPHEMERAL_RANGE.read_text().split())
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
