"""The core is synchronous: an async task runs it in a thread, and a cancelled one tells the thread to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def in_thread(call: Callable[[], T], interrupt: Callable[[], object] | None = None) -> T:
    """Run `call` in a thread. Cancelled meanwhile, it is interrupted, and its end awaited: nothing is left half-way.

    Args:
        call: What to run.
        interrupt: Makes `call` end soon; called from another thread.
    """
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            if interrupt is not None:
                await asyncio.to_thread(interrupt)
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that nobody warns of it: the cancellation is what counts
        raise
