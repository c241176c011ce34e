"""Which host this is: its name for people, and an identity that survives a change of the name."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

_MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the Linux kernel: the host's own processes live there, those of containers do not."""


def hostname() -> str:
    """Name of this host, for messages."""
    return socket.gethostname()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Changes with every boot: no process of an earlier one is alive."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def host_id() -> str:
    """Identity of the host that this process's pid belongs to, as 16 hexadecimal digits.

    It is derived from the machine-id, or from the hostname where there is none. Containers of one image share both, but
    not their pid namespaces: inside one, its inode and the boot id are part of the identity.
    """
    parts = [_machine_id() or hostname()]
    namespace = _pid_namespace()
    if namespace is not None and namespace != _INITIAL_PID_NAMESPACE:
        parts += [namespace, boot_id()]
    # Hashed, because machine-id(5) asks not to publish the id itself.
    return sha256("/".join(["shoal", *parts]).encode()).hexdigest()[:16]


def _machine_id() -> str | None:
    for path in _MACHINE_IDS:
        try:
            found = Path(path).read_text().strip()
        except OSError:
            continue
        if found and found != "uninitialized":  # systemd's placeholder in images
            return found
    return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
