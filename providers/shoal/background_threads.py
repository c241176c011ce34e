"""Threads that use the store in the background, and end before the interpreter does.

The interpreter waits for ordinary threads without a limit, and for daemon threads not at all: it runs the exit handlers
of libraries meanwhile, and then stops daemon threads at any instruction. So what they write may be lost, and a thread
inside the driver of a database may crash the process.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from contextvars import copy_context

log = logging.getLogger(__name__)

_END_S = 20.0
"""Seconds for which the end of the interpreter waits for all of these threads together. Transactions take milliseconds,
but may have to wait for other writers. Engines kill a process that has not ended some 30 s after a SIGTERM."""


class BackgroundThread(threading.Thread):
    """Daemon thread for whose end the interpreter waits, up to a limit. It uses the store of its starter.

    Args:
        work: Function that the thread calls.
        name: Name of the thread.
        stop: Function that lets `work` return soon; None if `work` does so by itself.
    """

    def __init__(self, work: Callable[[], object], *, name: str, stop: Callable[[], object] | None = None) -> None:
        super().__init__(target=copy_context().run, args=(work,), name=name, daemon=True)
        self.stop = stop


# `concurrent.futures` ends its threads earlier, by `threading._register_atexit`. At that time, the user's threads still
# run, and may need the lease that a thread renews. Exit handlers run in reverse order of their registration, so this
# handler runs before Airflow's, which is registered when Airflow is imported.
@atexit.register
def _end_threads() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundThread)]
    for thread in threads:
        if thread.stop is not None:
            thread.stop()
    end = time.monotonic() + _END_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            log.warning("this process ends before its thread %s has ended: its last changes may be lost", thread.name)
