"""Control this process of a worker or driver: its title, its working folder, its listening sockets, work that it
repeats in the background, and its end.

Workers and drivers do not end by a normal exit: Ray ends its actors with `os._exit`, a forked process would continue in
the frames of its parent, and a normal exit may hang in the threads of libraries. Therefore :func:`end_user_code` is the
last call of a worker, which the driver then kills, and the last step of a driver. :func:`ending_forks` ends the
processes that user code forks, where they would go on with the work of their parent.

Each XGBoost worker listens for errors of the other workers on all addresses of the host. The worker requires no token,
and XGBoost 3.2 has no setting for the address. LightGBM's workers (LightGBM 4.7) also listen on all addresses while
they connect to each other. Therefore :func:`tie_to_loopback` binds the libraries' sockets to the loopback device as
soon as the sockets are open. The command ``ss`` then shows ``0.0.0.0%lo`` for such a socket, and the kernel refuses
connections to all other addresses."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import io
import ipaddress
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from shoal.lazy_imports import ray
from shoal.new_files import create_folder


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


def end_within(limit_s: float, code: int, before: Callable[[], object]) -> None:
    """Call :func:`end_user_code`. If the call takes longer than a limit, call `before`, and end this process with an
    exit code."""

    def give_up() -> None:
        print(f"the threads and exit handlers of the driver did not end within {limit_s:g} s", flush=True)
        before()

    timer = threading.Timer(limit_s, end_now, (code, give_up))
    timer.daemon = True
    timer.start()
    end_user_code()
    timer.cancel()


def end_now(code: int, before: Callable[[], object]) -> NoReturn:
    """Call `before`, for 5 s at most and whatever it raises, and end this process with an exit code."""
    try:
        thread = threading.Thread(target=before, daemon=True)
        thread.start()
        thread.join(5.0)
    finally:
        os._exit(code)


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
    for module, _, name in (each.rpartition(".") for each in _CLOSED_AT_END):
        closed = getattr(sys.modules.get(module), name, None)  # None: this process has not imported the module
        of_class = [each for each in objects if closed in type(each).__mro__]
        writes += [each.close for each in of_class if not isinstance(each, io.IOBase) or _is_open_file(each)]
    writes += [each.flush for each in opened if isinstance(each, io.BufferedWriter | io.BufferedRandom)]
    for write in writes:
        with contextlib.suppress(Exception):  # the file is closed, or its disk is full
            write()


def _is_open_file(stream: io.IOBase) -> bool:
    try:
        return not stream.closed and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except io.UnsupportedOperation:  # a member of an archive, a remote file, or memory
        return True
    except (OSError, ValueError, AttributeError):  # the stream has no file, or was closed meanwhile
        return False


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


def print_to(output: int) -> None:
    """Let this process, which may be a fork with the buffered streams of its parent, print to a descriptor, line by
    line."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False) for descriptor in (1, 2)
    )


WORKER = "shoal worker"
"""First words of the titles of workers."""

_ARG_START, _ARG_END = 45, 46
"""Positions of the bounds of the command line in memory among the fields of ``/proc/self/stat`` after the name."""


def set_title(title: str) -> None:
    """Show a title in place of the command line of this process. A title that is longer is cut off."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    # The kernel reads the command line from the memory of the process. Python has copied it at its start.
    if (room := end - start) > 0:
        ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


_PREFIX = "shoal-work-"


_entered: str | None = None


def entered_folder() -> str | None:
    """Return the folder that this process has entered with :func:`enter_folder`; None if it has entered none."""
    return _entered


def enter_folder(folder: str, gang: str) -> str | None:
    """Change the working directory of this process to the job's folder.

    The folder may be missing on another host. On such a host, all workers of the gang (group of workers) use one
    temporary folder instead.

    Returns:
        The temporary folder, which has to be removed with :func:`remove_from_nodes`; None if `folder` is used.
    """
    global _entered
    try:
        os.chdir(folder)
        _entered = folder
        return None
    except OSError:
        own = Path(tempfile.gettempdir(), _PREFIX + sha256(gang.encode()).hexdigest()[:16])
        create_folder(own)
        os.chdir(own)
        os.environ["PWD"] = _entered = str(own)
        return str(own)


def written_files(known: Mapping[str, int | None]) -> dict[str, int]:
    """Return the sizes of the files in the entered folder, by their relative paths.

    Args:
        known: Files that were there before, with their sizes; they are left out if their sizes are the same, or None.
    """
    found = {}
    for parent, folders, names in os.walk(_entered or os.devnull):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for path in map(Path(parent).joinpath, names):
            name = path.relative_to(str(_entered)).as_posix()
            with contextlib.suppress(OSError):
                size = path.lstat().st_size
                if not path.is_symlink() and known.get(name, -1) not in (None, size):
                    found[name] = size
    return found


def remove_folders_of_dead(*prefixes: str) -> None:
    """Remove the folders that killed workers left in the node's temporary folder. In the name of such a folder, the
    worker's process id follows the prefix."""
    for prefix in prefixes:
        for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
            pid = folder.name.removeprefix(prefix).split("-")[0]
            if pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


def remove_from_nodes(folders: Mapping[str, str], timeout: float) -> None:
    """Remove the temporary folders of a gang that has ended. Folders on a lost node are not removed."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remove = ray.remote(num_cpus=0)(lambda folder: shutil.rmtree(folder, ignore_errors=True))
    on_nodes = [
        remove.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(folder)
        for node, folder in folders.items()
    ]
    if on_nodes:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(on_nodes, num_returns=len(on_nodes), timeout=timeout)


def is_loopback(address: str) -> bool:
    """Return whether a numeric IP address is a loopback address; False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def tie_to_loopback() -> None:
    """Find the sockets of this process that listen on all addresses, and bind them to the loopback device.

    Other hosts then cannot connect to these sockets.
    """
    for sock in open_listeners():
        try:
            if sock.getsockname()[0] in ("0.0.0.0", "::"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except PermissionError:
            # Linux kernels before 5.7 allow SO_BINDTODEVICE only to privileged processes. For other processes the call
            # fails, the socket stays open on all addresses, and the training continues.
            pass
        except OSError as error:
            # Another thread may close a listening socket at any time, as LightGBM does when its workers are connected.
            if error.errno not in (errno.EBADF, errno.ENOTSOCK):
                raise


def open_listeners() -> Iterator[socket.socket]:
    """Yield the listening TCP sockets of this process.

    The caller must not close a yielded socket, and must not use it after requesting the next socket.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:
            # The file descriptor is not a socket, or was closed in the meantime, so it is skipped.
            continue
        try:
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listening and sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
        except OSError:
            continue
        finally:
            # Other code uses this file descriptor, so detach() is called: it drops the socket object without closing
            # the descriptor.
            sock.detach()


@contextlib.contextmanager
def repeating(work: Callable[[], object], period_s: float, name: str) -> Iterator[None]:
    """Call a function every `period_s` seconds, in a thread with this name, while the ``with`` block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(period_s):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
