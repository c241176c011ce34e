"""A process that scales a pool of tiny nodes and dies by SIGKILL at one named step of it.

``python -m tests.pool.act SIZE DEADLINE STEP``; with STEP "none" it lists the steps that it went through.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.errors import ScaleError
from shoal.pool import journal
from shoal.pool.api import ComputePool
from shoal.pool.backends import BACKENDS, LocalBackend
from shoal.state import Store

die_at = sys.argv[3]
seen: list[str] = []


def step(name: str) -> None:
    if name not in seen:
        seen.append(name)
    if name == die_at:
        os.kill(os.getpid(), signal.SIGKILL)


def stepping(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        step(f"before {name}")
        result = function(*args, **kwargs)
        wrote.append(name)
        step(f"{name}, not committed")
        return result

    return wrapped


wrote: list[str] = []
transaction = Store.transaction


@contextmanager
def stepping_transaction(self: Store) -> Iterator[Any]:
    wrote.clear()
    with transaction(self) as session:
        yield session
    for name in wrote:
        step(f"{name}, committed")


class DyingBackend(LocalBackend):
    """Steps around every act on a node."""

    def start(self, node):
        step("before a start")
        super().start(node)
        step("after a start")

    def end(self, nodes):
        step("before the ends")
        outcome = super().end(nodes)
        step("after the ends")
        return outcome


def main() -> None:
    Store.transaction = stepping_transaction  # type: ignore[method-assign]
    for name in ("request_scale", "withdraw", "advance", "forget"):
        setattr(journal, name, stepping(name, getattr(journal, name)))
    BACKENDS["local"] = lambda: DyingBackend("tests.pool.tiny")
    import shoal.pool.api as api

    api.ensure_running = lambda: None
    size, deadline = int(sys.argv[1]), float(sys.argv[2])
    try:
        ComputePool("tiny").scale(size, options={"rollback_after_seconds": deadline})
        print("scaled")
    except ScaleError as error:
        print(f"failed: {error}")
    print("\n".join(seen))


if __name__ == "__main__":
    main()
