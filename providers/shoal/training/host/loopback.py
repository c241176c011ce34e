"""Restrict the boosting libraries' listening sockets to the loopback device if the pool uses loopback addresses.

Each XGBoost worker listens for errors of the other workers on all addresses of the host. The worker requires no token,
and XGBoost 3.2 has no setting for the address. LightGBM's workers (LightGBM 4.7) also listen on all addresses while
they connect to each other. Therefore this module binds the libraries' sockets to the loopback device as soon as the
sockets are open. The command ``ss`` then shows ``0.0.0.0%lo`` for such a socket, and the kernel refuses connections to
all other addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator


def is_loopback(address: str) -> bool:
    """Return whether a numeric IP address is a loopback address; False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def tie_to_loopback() -> None:
    """Find the sockets of this process that listen on all addresses, and bind them to the loopback device.

    Other hosts then cannot connect to these sockets.
    """
    for sock in open_listeners():
        try:
            if sock.getsockname()[0] in ("0.0.0.0", "::"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except PermissionError:
            # Linux kernels before 5.7 allow SO_BINDTODEVICE only to privileged processes. For other processes the call
            # fails, the socket stays open on all addresses, and the training continues.
            pass
        except OSError as error:
            # Another thread may close a listening socket at any time, as LightGBM does when its workers are connected.
            if error.errno not in (errno.EBADF, errno.ENOTSOCK):
                raise


def open_listeners() -> Iterator[socket.socket]:
    """Yield the listening TCP sockets of this process.

    The caller must not close a yielded socket, and must not use it after requesting the next socket.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:
            # The file descriptor is not a socket, or was closed in the meantime, so it is skipped.
            continue
        try:
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listening and sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
        except OSError:
            continue
        finally:
            # Other code uses this file descriptor, so detach() is called: it drops the socket object without closing
            # the descriptor.
            sock.detach()
