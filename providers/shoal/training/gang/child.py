"""Run one worker of a gang in a process without Ray: a new Python process, or a fork of a template.

The driver starts a new process as ``python -P -m shoal.training.gang.child DESCRIPTOR PATH ...``. DESCRIPTOR is the
number of the worker's socket to the driver. The driver sends calls of the methods of `Worker`, and this process
executes the calls in their order. The process ends when the driver closes the socket or has ended. Each PATH is a
folder from which the driver can import modules; this process then can import them, too.

A template is a process that has imported the training library and done nothing else. A driver forks it from itself at
its start, while it has one thread and has run no code of a job. The workers, and XGBoost's tracker, are forked from it:
they share the memory of the modules that the driver, the template and they need, and start without imports. Because
PyTorch takes seconds to import, the fork server of a pool without Ray keeps a template that has imported it, and lets
it fork a template for each driver."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import cloudpickle

from shoal.training.gang.worker import Failure, Worker
from shoal.training.host.imports import before_forks, import_lean, thread_count
from shoal.training.host.memory import trim_memory
from shoal.training.host.own_process import ending_forks, print_to
from shoal.training.host.process_channel import ProcessChannel

TORCH_MODULES = ("torch", "torch._dynamo")
"""Modules of PyTorch that a template imports. The first optimizer of each worker would import the compiler
(``torch._dynamo``), which takes longer than PyTorch."""


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
        return bytes(cloudpickle.dumps(getattr(served, name)(*args)))
    except BaseException as error:  # a user's object may raise SystemExit when it is unpickled
        summary = "".join(traceback.format_exception_only(error)).strip()
        return bytes(cloudpickle.dumps(Failure(summary, traceback.format_exc(), None)))


class Template:
    """Process that forks the workers; the driver calls the methods of this class over a socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._can_fork = True

    def prepare(self, cpus: int, trim: bool, folders: Sequence[str], modules: Sequence[str], complete: bool) -> None:
        """Import the modules that the workers need, and for user code (`complete`) also their optional packages."""
        os.environ["OMP_NUM_THREADS"] = str(max(1, cpus))
        self._can_fork = False  # if a module raises an error, a new process shows it
        add_to_path(folders)
        if trim:
            trim_memory()
        with before_forks():
            import_lean(modules, complete=complete)
        # Without `gc.freeze`, the garbage collection of a worker would copy the memory that the worker shares with this
        # process.
        gc.freeze()
        self._can_fork = True

    def fork(self, run: Callable[..., object], args: Sequence[object], number: int) -> int:
        """Fork a process that calls a function with file descriptors and arguments, and return its process id.

        Directly after this call, the driver sends the `number` file descriptors.

        Raises:
            OSError: The machine has no room for another process, or a module has started a thread or raised an error.
        """
        _, descriptors, _, _ = socket.recv_fds(self._control, 1, number)
        try:
            if not self._can_fork or thread_count() > 1:
                raise OSError("a module of the template has started a thread or raised an error")
            pid = os.fork()
            if not pid:
                self._become(partial(run, *descriptors, *args))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return pid

    def exit_code(self, pid: int) -> int:
        """Wait until a worker has ended, and return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _become(self, run: Callable[[], object]) -> NoReturn:
        try:
            self._control.close()
            # Otherwise NumPy and PyTorch would draw the same numbers in all workers.
            if numpy_random := sys.modules.get("numpy.random"):
                numpy_random.seed()
            if torch := sys.modules.get("torch"):
                torch.default_generator.seed()
            run()
        finally:
            os._exit(1)


def serve_worker(calls: int, output: int) -> NoReturn:
    """Run a worker in this process, given the descriptors of the socket with the driver's calls and of the output."""
    print_to(output)
    os.close(output)
    serve(socket.socket(fileno=calls), Worker())


def serve_template(calls: int, output: int, folder: str, variables: Mapping[str, str]) -> NoReturn:
    """Run the template of a driver in this process, with the folder, output and variables of the driver.

    Its processes are in a session of their own, by which the fork server finds those that the driver leaves.
    """
    os.setsid()
    print_to(output)
    os.close(output)
    os.chdir(folder)
    os.environ.update(variables)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control = socket.socket(fileno=calls)
    serve(control, Template(control))


NO_PROCESS = 0
"""Process id in place of that of a process that does not exist."""


class TemplateOfTemplates:
    """Handle of a template that forks a template for each driver. Requests wait for its imports, the caller does not.

    Args:
        control: Socket to the template.
        pid: Process id of the template.
    """

    def __init__(self, control: socket.socket, pid: int) -> None:
        self.pid = pid
        self.channel = ProcessChannel(control)
        self._drivers: deque[int] = deque()

    def load(self, modules: Sequence[str]) -> None:
        """Request imports."""
        self._request(NO_PROCESS, "prepare", 1, False, sys.path, modules, True)

    def fork(self, driver: int, folder: str, log: int, control: socket.socket, variables: Mapping[str, str]) -> None:
        """Request the template of a driver.

        Args:
            driver: Process id of the driver.
            folder: Folder of the driver.
            log: Descriptor of the log of the driver.
            control: End of a socket, of which the driver has the other end.
            variables: Environment variables of the template and its forks.
        """
        self._request(driver, "fork", serve_template, (folder, variables), 2)
        socket.send_fds(self.channel.socket, [b"+"], [control.fileno(), log])

    def session(self) -> tuple[int, int]:
        """Receive an answer. Return the process id of a driver, and the session of its template; `NO_PROCESS` for one
        that does not exist.

        Raises:
            EOFError: The template has ended.
        """
        session = cloudpickle.loads(self.channel.receive())
        return self._drivers.popleft(), session if isinstance(session, int) else NO_PROCESS

    def _request(self, driver: int, method: str, *args: object) -> None:
        self._drivers.append(driver)
        self.channel.send(cloudpickle.dumps((method, args)))


def fork_template(begin: Callable[[], object] = lambda: None) -> tuple[socket.socket, int] | None:
    """Fork a template from this process, which must have only one thread.

    Args:
        begin: Function that the template calls first.

    Returns:
        The driver's end of the socket to the template, and the template's process id. The template ends when this
        socket is closed. None if the machine has no room for another process; the workers are then started without a
        template.
    """
    with contextlib.ExitStack() as opened:
        try:
            ours, theirs = map(opened.enter_context, socket.socketpair())
            pid = os.fork()
        except OSError:
            return None
        opened.pop_all()
    if not pid:
        try:
            ours.close()
            begin()
            serve(theirs, Template(theirs))
        finally:
            os._exit(1)
    theirs.close()
    return ours, pid


if __name__ == "__main__":
    add_to_path(sys.argv[2:])
    serve(socket.socket(fileno=int(sys.argv[1])), Worker())
