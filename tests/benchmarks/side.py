"""A side of a benchmark: something to measure, in a process of its own, that answers one request after the other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

Answer = Callable[[Any], Any]
"""From a request to what came of it, both picklable."""


class SideError(Exception):
    """The side raised, or its process died; which is a result, too."""


class Side:
    """A process that is set up once and then answers.

    Args:
        opened: Sets up and tears down what answers: a context manager of a module, because the process is spawned.
        args: Its arguments.
    """

    def __init__(self, opened: Callable[..., AbstractContextManager[Answer]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, opened, args))
        self._process.start()
        theirs.close()
        self._receive()

    @property
    def pid(self) -> int:
        """Its process; what it starts are the children."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, request: Any) -> Any:
        """Have it answer.

        Raises:
            SideError: If it raised, or died.
        """
        self._pipe.send(request)
        return self._receive()

    def close(self) -> None:
        """End it, and see it gone."""
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join()

    def _receive(self) -> Any:
        try:
            answer, error = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise SideError(f"its process ended with exit code {self._process.exitcode}") from None
        if error is not None:
            raise SideError(error)
        return answer


def _serve(pipe: Connection, opened: Callable[..., AbstractContextManager[Answer]], args: tuple[Any, ...]) -> None:
    with opened(*args) as answer:
        pipe.send((None, None))
        while (request := pipe.recv()) is not None:
            try:
                pipe.send((answer(request), None))
            except Exception as error:
                pipe.send((None, f"{type(error).__name__}: {error}"))
