"""Run one worker of a gang (group of workers) in a process without Ray.

The driver starts the process as ``python -P -m shoal.training.gang.child DESCRIPTOR PATH ...``.

DESCRIPTOR is the number of the worker's socket to the driver. The driver sends calls of the methods of `Worker`, and
this process executes the calls in their order. The process ends when the driver closes the socket or has ended. Each
PATH is a folder from which the driver can import modules; this process then can import them, too.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterable
from typing import NoReturn

import cloudpickle

from shoal.training.gang.worker import Failure, Worker
from shoal.training.host.forks import ending_forks
from shoal.training.host.process_channel import ProcessChannel


def serve(driver: socket.socket, served: object) -> NoReturn:
    """Call the methods of an object for the driver, and end this process when the driver closes the socket."""
    channel = ProcessChannel(driver)
    while True:
        try:
            call = channel.receive()
            with ending_forks():
                answer = _answer(served, call)
            channel.send(answer)
        except (EOFError, OSError):
            os._exit(0)


def add_to_path(folders: Iterable[str]) -> None:
    """Let this process import modules from more folders, which are searched after the folders in `sys.path`."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def _answer(served: object, call: bytes) -> bytes:
    """Call the method that the driver has requested, and return the pickled result.

    If the call cannot be unpickled, or the result cannot be pickled, return a pickled `Failure`.
    """
    try:
        name, args = cloudpickle.loads(call)
        answer: bytes = cloudpickle.dumps(getattr(served, name)(*args))
    except BaseException as error:  # a user's object may raise SystemExit when it is unpickled
        summary = "".join(traceback.format_exception_only(error)).strip()
        answer = cloudpickle.dumps(Failure(summary, traceback.format_exc(), None))
    return answer


if __name__ == "__main__":
    add_to_path(sys.argv[2:])
    serve(socket.socket(fileno=int(sys.argv[1])), Worker())
