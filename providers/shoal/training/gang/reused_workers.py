"""Reuse the workers of a finished training for the next training, because starting workers takes seconds.

After a run, this process keeps the idle gang (group of workers) for the next run with the same number and size of
workers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.training.gang.gang import Gang
from shoal.training.gang.placement import GangShape
from shoal.training.timeouts import RESOURCES_WAIT_S

_idle: dict[tuple[Any, ...], Gang] = {}
_idle_lock = threading.Lock()


@contextlib.contextmanager
def shared_gang(
    shape: GangShape, *, timeout: float = RESOURCES_WAIT_S, env: Mapping[str, str] | None = None
) -> Iterator[Gang]:
    """Provide a gang (group of workers) to one run, and keep the gang for later runs with the same number and size of
    workers.

    An idle gang keeps its CPUs until :func:`end_gangs` is called, this process ends, or a run needs workers of another
    number or size.

    Raises:
        CapacityError: The active nodes are too small for the gang, or had no free room within `timeout`.
        WorkerLostError: A worker died while it started.
    """
    key = (shape, tuple(sorted((env or {}).items())))
    with _idle_lock:
        gang = _idle.pop(key, None)
    if gang is None or not gang.sound:
        if gang is not None:
            gang.end()
        # Other idle gangs (groups of workers) still reserve CPUs that the new gang may need, so they are ended first.
        end_gangs()
        gang = Gang.start(shape, timeout=timeout, env=env)
    try:
        yield gang
    except BaseException:
        gang.end()
        raise
    _end_at_exit()
    with _idle_lock:
        spare = _idle.setdefault(key, gang)
    if spare is not gang:
        # Another thread of this driver has just stored an idle gang with the same number and size of workers. Only one
        # such gang is kept, so the gang of this run ends.
        gang.finish()


def end_gangs() -> None:
    """End the idle gangs (groups of workers) that this process keeps for later runs."""
    while True:
        with _idle_lock:
            if not _idle:
                return
            _, gang = _idle.popitem()
        gang.finish()


@functools.cache
def _end_at_exit() -> None:
    # Exit handlers run in reverse order of their registration. This handler needs Ray, so it must run before Ray's own
    # handler shuts Ray down. Ray registers its handler when it is imported, so this handler is registered after the
    # import of Ray.
    atexit.register(end_gangs)
