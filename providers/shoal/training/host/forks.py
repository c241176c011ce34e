"""End the processes that user code forks where they would go on with the work of the process that called the code."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """End each process that user code in the ``with`` block forks when it leaves the block, by a return or an
    exception.

    Otherwise it would go on with the work of its parent: train, write files and answer in the parent's name. All calls
    of user code are in such a block.
    """
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        raise
    if os.getpid() != process:
        _end(None)


def _end(error: BaseException | None) -> NoReturn:
    """End this process as Python ends one with this error. Exit handlers do not run, because they are the parent's."""
    code = 1
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        elif error is not None:
            traceback.print_exception(error)
        else:
            print(
                f"the process {os.getpid()}, which was forked in process {os.getppid()}, was ended, because it "
                "returned from the user's function: end such a process with os._exit()"
            )
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
