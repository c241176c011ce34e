"""Who asks: the name that operations, leases and jobs carry."""

from __future__ import annotations

import getpass
import os
import socket


def host() -> str:
    """Name of this machine, as pools that are bound to it carry it."""
    return socket.gethostname()


ANYWHERE = ""
"""Instead of a host's name: what a pool carries that any host can act on."""


def is_here(pool_host: str) -> bool:
    """Whether a pool that carries this host can be acted on from this machine."""
    return pool_host in (ANYWHERE, host())


def python_holder() -> str:
    """``python:<user>@<host>/<pid>``: a plain Python process."""
    return f"python:{getpass.getuser()}@{host()}/{os.getpid()}"


def cli_holder() -> str:
    """``cli:<user>@<host>``: somebody at a terminal."""
    return f"cli:{getpass.getuser()}@{host()}"
