"""End the user code of a worker or driver as the Python interpreter ends: wait for threads, run exit handlers, write
open files.

Workers and drivers do not end by a normal exit: Ray ends its actors with `os._exit`, a forked process would continue in
the frames of its parent, and a normal exit may hang in the threads of libraries. Therefore these steps are the last
call of a worker, which the driver then kills, and the last step of a driver.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator


def forget_exit_handlers() -> None:
    """Remove the exit handlers of this process, so that :func:`end_user_code` calls only later ones.

    A forked process inherits the handlers of its parent, which, for example, remove the parent's temporary folders. A
    Ray worker has a handler that disconnects from Ray.
    """
    atexit._clear()
    finalize = weakref.finalize
    for inherited in list(finalize._registry):  # type: ignore[attr-defined]
        inherited.atexit = False
    # Python registers these handlers once a process, so the removed ones would not be registered again. The first one
    # ends the processes and queues of `multiprocessing`; the inherited ones belong to the parent.
    if util := sys.modules.get("multiprocessing.util"):
        util._finalizer_registry.clear()
        sys.modules["multiprocessing.process"]._children.clear()
        atexit.register(util._exit_function)
    atexit.register(finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def end_within(limit_s: float, code: int) -> None:
    """Call :func:`end_user_code`, and end this process with an exit code if the call takes longer than a limit."""

    def give_up() -> None:
        print(f"the threads and exit handlers of the driver did not end within {limit_s:g} s", flush=True)
        os._exit(code)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    end_user_code()
    timer.cancel()


def end_user_code() -> None:
    """Wait for the threads that are no daemons, call the exit handlers, and write the buffers of all open files."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    write_open_files()


_CLOSED_AT_END = (
    "zipfile._ZipWriteFile",
    "gzip.GzipFile",
    "bz2.BZ2File",
    "lzma.LZMAFile",
    "zipfile.ZipFile",
    "shelve.Shelf",
    "pyarrow.parquet.core.ParquetWriter",
    "fsspec.spec.AbstractBufferedFile",
)
"""Classes whose files are complete only when they are closed, which the interpreter does by their `__del__`. An object
of an earlier class may write into an object of a later class."""


def write_open_files() -> None:
    """Write the buffered data of all open files, as the interpreter does at its end.

    Files of the classes in `_CLOSED_AT_END` are closed, because a flush alone does not complete them. Pipes and sockets
    are left out: writing to them blocks if their reader is stuck.
    """
    gc.collect()
    # `type` runs no code of the objects. `isinstance` reads `__class__`, at which objects of PyTorch print a warning.
    objects = gc.get_objects()
    opened = [each for each in objects if issubclass(type(each), io.IOBase) and _is_open_file(each)]
    # The order matters: a text file writes into a compressed file, which writes into a buffered one.
    writes = [each.flush for each in opened if isinstance(each, io.TextIOWrapper)]
    for closed in _classes(_CLOSED_AT_END):
        of_class = [each for each in objects if closed in type(each).__mro__]
        writes += [each.close for each in of_class if not isinstance(each, io.IOBase) or _is_open_file(each)]
    writes += [each.flush for each in opened if isinstance(each, io.BufferedWriter | io.BufferedRandom)]
    for write in writes:
        with contextlib.suppress(Exception):  # the file is closed, or its disk is full
            write()


def _classes(names: Iterable[str]) -> Iterator[type]:
    """Yield the classes whose modules this process has imported."""
    for module, _, name in (each.rpartition(".") for each in names):
        if found := getattr(sys.modules.get(module), name, None):
            yield found


def _is_open_file(stream: io.IOBase) -> bool:
    try:
        return not stream.closed and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except io.UnsupportedOperation:  # a member of an archive, a remote file, or memory
        return True
    except (OSError, ValueError, AttributeError):  # the stream has no file, or was closed meanwhile
        return False
