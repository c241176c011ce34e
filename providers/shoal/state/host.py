"""Return this host's name for messages, and an id that stays the same if the host is renamed."""

from __future__ import annotations

import os
import socket
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

_MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Id of the pid namespace of processes outside of containers. The number is a constant of the Linux kernel
(PROC_PID_INIT_INO). Processes in containers usually have another namespace."""


def hostname() -> str:
    """Return the name of this host, for messages."""
    return socket.gethostname()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of the host's current boot. A process from an earlier boot has another boot id, and has ended."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@lru_cache(maxsize=1)
def host_id() -> str:
    """Return the id of this host, or of the container in which this process runs, as 16 hexadecimal digits.

    The id is computed from the machine-id, or from the hostname if there is no machine-id. Containers of one image may
    have the same machine-id and the same hostname, but they have different pid namespaces. So in a container, the pid
    namespace and the boot id are included in the computation.
    """
    parts = [_machine_id() or hostname()]
    namespace = _pid_namespace()
    if namespace is not None and namespace != _INITIAL_PID_NAMESPACE:
        parts += [namespace, boot_id()]
    # The id is hashed because the manual page machine-id(5) asks programs not to show the machine-id itself.
    return sha256("/".join(["shoal", *parts]).encode()).hexdigest()[:16]


def _machine_id() -> str | None:
    for path in _MACHINE_IDS:
        try:
            found = Path(path).read_text().strip()
        except OSError:
            continue
        # Images of containers and virtual machines contain systemd's placeholder "uninitialized" instead of an id.
        if found and found != "uninitialized":
            return found
    return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
