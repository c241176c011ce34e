"""Gangs that outlive a run: the last of each shape waits, idle, for the driver's next run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.training.gang.gang import WAIT_SECONDS, Gang, GangShape

_idle: dict[tuple[Any, ...], Gang] = {}
_idle_lock = threading.Lock()


@contextlib.contextmanager
def shared_gang(
    shape: GangShape, *, timeout: float = WAIT_SECONDS, env: Mapping[str, str] | None = None
) -> Iterator[Gang]:
    """A gang that outlives the run, for the driver's next of its shape: starting costs seconds, reusing nothing.

    It keeps its CPUs until :func:`end_gangs`, the end of this process, or a run of another shape.

    Args:
        shape: Number and size of the workers.
        timeout: Seconds to wait for CPUs and GPUs that are in use.
        env: Environment variables for the workers; a gang is reused only with the same ones.

    Yields:
        The gang, for this run alone. If the run fails, it ends.

    Raises:
        CapacityError: As :meth:`Gang.start`.
    """
    key = (shape, tuple(sorted((env or {}).items())))
    with _idle_lock:
        gang = _idle.pop(key, None)
    if gang is None or not gang.sound:
        if gang is not None:
            gang.end()
        # Idle gangs of other shapes hold CPUs that this one may need.
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
        # Another thread of this driver put one aside meanwhile.
        gang.end()


def end_gangs() -> None:
    """Ends the gangs that wait for another run."""
    while True:
        with _idle_lock:
            if not _idle:
                return
            _, gang = _idle.popitem()
        gang.end()


@functools.cache
def _end_at_exit() -> None:
    # Not at import: handlers run last registered first, and this one needs Ray, whose own is registered when Ray is
    # imported.
    atexit.register(end_gangs)
