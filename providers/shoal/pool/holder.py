"""Who asks: the name that operations, leases and jobs carry."""

from __future__ import annotations

import getpass
import os

from shoal.state.host import host_id, hostname
from shoal.state.schema import Pool

ANYWHERE = ""
"""Instead of a host's name: what a pool carries that any host can act on."""


def is_here(pool: Pool) -> bool:
    """Whether a pool can be acted on from this machine.

    A row of shoal 0.1 holds no identity: it belongs to the machine that has the hostname in it.
    """
    if pool.host == ANYWHERE:
        return True
    return pool.host == hostname() if pool.host_id is None else pool.host_id == host_id()


def bind_here(pool: Pool) -> None:
    """Note in a pool's row that it is bound to this machine."""
    pool.host, pool.host_id = hostname(), host_id()


def is_bound_here(pool: Pool) -> bool:
    """Whether a pool's row, where it names a host at all, has this machine's name and identity."""
    return pool.host == ANYWHERE or (pool.host, pool.host_id) == (hostname(), host_id())


def python_holder() -> str:
    """``python:<user>@<host>/<pid>``: a plain Python process."""
    return f"python:{getpass.getuser()}@{hostname()}/{os.getpid()}"


def cli_holder() -> str:
    """``cli:<user>@<host>``: somebody at a terminal."""
    return f"cli:{getpass.getuser()}@{hostname()}"
