"""Run shoal's synchronous functions in a thread, so that async tasks can await them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def in_thread(call: Callable[[], T], interrupt: Callable[[], object] | None = None) -> T:
    """Run the function `call` in a thread, and return the result of the function.

    If the async task is cancelled, this function calls `interrupt` and waits until `call` has ended. Otherwise `call`
    would go on in its thread after the task has ended.
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
            # Read the exception that `call` may have raised, because asyncio logs a warning about an exception that is
            # never read.
            running.exception()
        raise
