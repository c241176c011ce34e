"""Run one worker of a gang (group of workers) in a process without Ray.

The driver starts the process as ``python -P -m shoal.training.gang.child DESCRIPTOR PATH ...``.

DESCRIPTOR is the number of the worker's socket to the driver. The driver sends calls of the methods of `Worker`, and
this process answers the calls in their order. The process ends when the driver closes the socket or has ended. Each
PATH is a folder from which the driver can import modules; this process then can import them, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection

import cloudpickle

from shoal.training.gang.worker import Failure, Worker


def main() -> None:
    """Answer the driver's calls until the driver closes the socket."""
    driver = Connection(int(sys.argv[1]))
    sys.path += [path for path in sys.argv[2:] if path not in sys.path]
    worker = Worker()
    while True:
        try:
            call = driver.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        answer = _answer(worker, call)
        try:
            driver.send_bytes(answer)
        except OSError:
            os._exit(0)


def _answer(worker: Worker, call: bytes) -> bytes:
    """Call a method of the worker, and return the pickled result.

    If the call cannot be unpickled, or the result cannot be pickled, return a pickled `Failure`.
    """
    try:
        name, args = cloudpickle.loads(call)
        answer: bytes = cloudpickle.dumps(getattr(worker, name)(*args))
    except Exception as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        answer = cloudpickle.dumps(Failure(summary, traceback.format_exc(), None))
    return answer


if __name__ == "__main__":
    main()
