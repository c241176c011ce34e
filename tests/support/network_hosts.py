"""Several hosts on one machine: a network namespace each, joined by a bridge that this process is on too.

The bridge stands in a namespace of its own: no firewall rule and no route of the machine reaches into it, and taking
the namespaces away takes every link along. Nothing leads from there to any other network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from shoal.os_processes import process_stat
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Host:
    """One host: a network namespace with an address, on a port of the switch."""

    namespace: str
    address: str
    switch: str
    port: str

    def cut(self) -> None:
        """Its link goes: no packet gets through, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def join(self) -> None:
        """Its link is there (again)."""
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def processes(self) -> list[int]:
        """The processes on it."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """SIGKILL all its processes, as when it loses its power."""

        def killed() -> bool:
            left = [pid for pid in self.processes() if process_stat(pid) is not None]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_until(killed, f"the end of all processes of {self.namespace}")


@contextmanager
def cut_between(one: Host, other: Host) -> Iterator[None]:
    """The link between two hosts is down; each still reaches all others."""
    _isolate(one, other, state="on")
    try:
        yield
    finally:
        _isolate(one, other, state="off")


def _isolate(*hosts: Host, state: str) -> None:
    # The switch lets no packet through between two isolated ports.
    for host in hosts:
        _ip("-n", host.switch, "link", "set", host.port, "type", "bridge_slave", "isolated", state)


def refusal() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    probe = f"shoal-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        _ip("netns", "delete", probe)
        return None
    return f"`ip netns add` is refused: {made.stderr.strip()}"


@dataclass(frozen=True)
class Switch:
    """The bridge, in a network namespace; this machine is on it, too, with the address `NETWORK.1`."""

    namespace: str
    network: str

    def plug_in(self, namespace: str, number: int, gateway: bool = False) -> Host:
        """Make a host with this number in the network; with `gateway`, all other addresses are looked for here."""
        host = Host(namespace, f"{self.network}.{number}", self.namespace, f"port{number}")
        inside = ("-n", namespace)
        _ip("netns", "add", namespace)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", host.port, "netns", self.namespace)
        _ip("-n", self.namespace, "link", "set", host.port, "master", "bridge", "up")
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        if gateway:
            _ip(*inside, "route", "add", "default", "via", f"{self.network}.1")
        return host


@contextmanager
def switch() -> Iterator[Switch]:
    """A bridge without hosts; it is gone afterwards, with all hosts whose namespaces start with the name of its own."""
    prefix = f"sh{secrets.token_hex(3)}"  # a device's name has 15 characters at most
    made = Switch(prefix, _free_network())
    here = f"{prefix}up"
    try:
        _ip("netns", "add", prefix)
        _ip("-n", prefix, "link", "set", "lo", "up")
        _ip("-n", prefix, "link", "add", "bridge", "type", "bridge")
        _ip("-n", prefix, "link", "set", "bridge", "up")
        _ip("link", "add", here, "type", "veth", "peer", "name", here, "netns", prefix)
        _ip("-n", prefix, "link", "set", here, "master", "bridge", "up")
        _ip("address", "add", f"{made.network}.1/24", "dev", here)
        _ip("link", "set", here, "up")
        yield made
    finally:
        # The kernel clears a namespace away in the background: this one end of a link would be seen for a moment.
        subprocess.run(["ip", "link", "delete", here], capture_output=True, check=False)
        for line in _ip("netns", "list").splitlines():
            if (namespace := line.split()[0]).startswith(prefix):
                _ip("netns", "delete", namespace)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, which see each other and are seen from here; all of it is gone afterwards."""
    with switch() as made:
        yield [made.plug_in(f"{made.namespace}h{i}", 10 + i) for i in range(count)]


def _free_network() -> str:
    """The first three numbers of a /24 of what RFC 2544 keeps for such tests, and nobody here has a route to."""
    routes = _ip("-4", "route", "show", "table", "all")
    return next(net for i in range(256) if f"{(net := f'198.18.{i}')}." not in routes)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
