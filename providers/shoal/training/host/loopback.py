"""Keeping the boosting libraries' own listeners off the network where the pool is on loopback.

A worker of XGBoost's collective listens, for errors of its peers, on all the host's addresses and asks for no token; no
setting changes that (3.2). LightGBM's workers do the same while they connect (4.7). What the kernel offers is to tie a
listening socket to one network device afterwards: ``ss`` then shows ``0.0.0.0%lo``, and connections to any address but
loopback's are refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator


def is_loopback(address: str) -> bool:
    """Whether an address, given as a number, is one of loopback's."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def tie_to_loopback() -> None:
    """Ties this process's sockets that listen on all addresses to the loopback device."""
    for sock in open_listeners():
        if sock.getsockname()[0] in ("0.0.0.0", "::"):
            # Refused to the unprivileged by kernels before 5.7.
            with contextlib.suppress(PermissionError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")


def open_listeners() -> Iterator[socket.socket]:
    """This process's listening TCP sockets; each is valid until the next is asked for, and none is to be closed."""
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:
            # No socket, or closed meanwhile.
            continue
        try:
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listening and sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
        except OSError:
            continue
        finally:
            # The descriptor is another's.
            sock.detach()
