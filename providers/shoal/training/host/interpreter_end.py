"""End a worker's user code as the Python interpreter ends: wait for threads, run exit handlers, write open files.

Workers do not end by a normal exit: Ray ends its actors with `os._exit`, a forked worker would continue in the frames
of the driver, and a normal exit may hang in the threads of libraries. Therefore the driver requests these steps as a
last call, and kills the workers afterwards.
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


def forget_exit_handlers() -> None:
    """Remove the exit handlers of this process, so that :func:`end` calls only handlers that are registered later.

    A forked worker inherits the driver's handlers, which, for example, remove the driver's temporary folders. A Ray
    worker has a handler that disconnects from Ray.
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


def end() -> None:
    """Wait for the threads that are no daemons, call the exit handlers, and write the buffers of all open files."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    write_open_files()


def write_open_files() -> None:
    """Write the buffered data of all open files, as the interpreter does at its end.

    Compressed files are closed, because a flush alone does not complete them. Pipes and sockets are left out: writing
    to them blocks if their reader is stuck.
    """
    gc.collect()
    # `type` runs no code of the objects. `isinstance` reads `__class__`, at which objects of PyTorch print a warning.
    opened = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase) and _is_open_file(each)]
    # The order matters: a text file writes into a compressed file, which writes into a buffered one.
    writes = [each.flush for each in opened if isinstance(each, io.TextIOWrapper)]
    writes += [each.close for each in opened if type(each).__module__ in ("gzip", "bz2", "lzma")]
    writes += [each.flush for each in opened if isinstance(each, io.BufferedWriter | io.BufferedRandom)]
    for write in writes:
        with contextlib.suppress(OSError, ValueError):  # the file is closed, or its disk is full
            write()


def _is_open_file(stream: io.IOBase) -> bool:
    try:
        return not stream.closed and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # the stream has no file, or was closed meanwhile
        return False
