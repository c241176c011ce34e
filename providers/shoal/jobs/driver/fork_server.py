"""Start drivers in milliseconds: fork, for each job, a process that has already imported the modules of a driver.

A pool's head starts this process (``python -P -m shoal.jobs.driver.fork_server``) and writes a request for each job to
its stdin, as a line of JSON. The answers on its stdout are lines of JSON, too: one when a driver has started or could
not be started, one when it has ended. The process has one thread and runs no code of a job, and each driver serves one
job. The drivers end with the process that forked them, and that process ends with the head. When a driver has
ended, the process kills what is left of the driver's job, such as processes that a training function has forked.

The process imports the libraries of the jobs, so that the drivers need no time for them. Before the first job, it
imports those that the pool's spec names. The request for a driver names the libraries of its job, and each driver
reports at its end which of the `PRELOADED` modules it has imported. Only workers need PyTorch. A process of its own
imports it, and forks a template of workers for each driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn, TextIO

import psutil

from shoal.boosting_libraries import BOOSTING_LIBRARIES, MLFLOW_STORE
from shoal.jobs.timeouts import FORK_SERVER_IDLE_S
from shoal.os_processes import python_command
from shoal.secrets.hidden_output import DRIVER_TAG
from shoal.training.gang.child import NO_PROCESS, TORCH_MODULES, TemplateOfTemplates, fork_template
from shoal.training.host.imports import before_forks, import_lean, thread_count
from shoal.training.host.memory import OomKills
from shoal.training.host.own_process import WORKER

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

PRELOADED = (
    "numpy",
    "pandas",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "fsspec",
    "fsspec.implementations.local",
    "mlflow",
    "mlflow.models",
    f"{MLFLOW_STORE}.tracking.sqlalchemy_store",
    f"{MLFLOW_STORE}.model_registry.sqlalchemy_store",
    "ray",
    *BOOSTING_LIBRARIES,
)
"""Modules that the server may import. A driver needs 2 to 3 s for all of them."""

_ALWAYS = ("numpy", "pyarrow", "fsspec")
"""Libraries that are imported whenever a job needs a library."""

_DATABASE_MODULE = f"{MLFLOW_STORE}.tracking.sqlalchemy_store"
"""Module with which MLflow's database is created."""

_LEAN = tuple(BOOSTING_LIBRARIES)
"""Modules that are imported without optional packages. A driver that needs these packages imports the modules again."""

_NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true"}
"""Variable for workers that import MLflow themselves; others inherit an MLflow that was imported with it."""

_PAUSE_S = 0.2
"""Seconds without a request after which the server imports a module that an ended driver has used. The import waits,
because the next request may follow at once."""

_NICE = 10
"""What is added to the nice value for imports before the first job: the nodes, which are starting, come first."""

_NICE_OF_DATABASE = 5
"""What is added to the nice value while the database is created. The first driver waits for it."""

_IMPORT_PATIENCE_S = 3.0
"""Longest time in seconds for which a request waits for an import with a low priority. If other programs use all CPUs,
the import may take minutes."""

_THREAD_END_S = 0.5
"""Longest time in seconds that the kernel needs to end a thread that has returned."""


class ForkServer:
    """Server that forks a process for each driver, and reports when the process ends.

    Args:
        excluded: Modules that the server must not import, because they start threads.
    """

    def __init__(self, excluded: Sequence[str] = ()) -> None:
        self._excluded = set(excluded)
        self._preloaded: set[str] = set()
        self._wanted: list[str] = []
        self._had_request = False
        self._creates_database = False
        self._database_creator: int | None = None
        # Each driver gets the writing end of this pipe, and writes one line to it.
        self._reports, self._report_to = os.pipe()
        # The answers have a descriptor of their own, so that texts that a library prints do not mix with the answers.
        self._answers = os.dup(1)
        os.dup2(2, 1)
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._running: dict[int, tuple[str, OomKills]] = {}
        self._ended: set[int] = set()
        """Sessions of ended drivers and of their templates."""
        self._has_modules = False
        self._torch: TemplateOfTemplates | None = None
        self._sessions: dict[int, int] = {}
        """Sessions of the templates that `_torch` has forked, by the process ids of their drivers."""
        self._selector = selectors.DefaultSelector()
        # A process whose parent has ended becomes a child of this process, and not of init.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        """Start drivers, and report their ends, until stdin is closed."""
        requests = b""
        for descriptor in (0, self._woken, self._reports):
            self._selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = self._selector.select(self._patience_s())
            for key, _ in ready:
                if self._torch and key.fileobj is self._torch.channel.socket:
                    self._note_session()
                    continue
                read = os.read(key.fd, 65536)
                if key.fd == self._woken:
                    self._report_ends()
                elif key.fd == self._reports:
                    self._wanted += read.decode().split()
                elif not read:
                    return
                else:
                    *lines, requests = (requests + read).split(b"\n")
                    for line in lines:
                        self._answer_request(json.loads(line))
            if not ready:
                if not self._has_modules:
                    self._import_modules()
                elif self._wanted:
                    self._preload(self._wanted.pop(0))
                    self._create_database()
                elif not self._running:
                    self._restart()

    def _patience_s(self) -> float | None:
        """Return how long the server waits for requests before it imports a module or restarts; None means for ever."""
        if not self._has_modules:
            return 0.0
        if self._wanted:
            return _PAUSE_S if self._had_request else 0.0
        if self._running or not (self._preloaded or self._torch):
            return None
        with contextlib.suppress(OSError):  # no descriptor is left
            if thread_count() > 1:
                return _PAUSE_S
        return FORK_SERVER_IDLE_S

    def _import_modules(self) -> None:
        """Import the modules of drivers, which takes a second: the template of PyTorch is forked earlier."""
        if self._has_modules:
            return
        self._has_modules = True
        from shoal.jobs.driver import main  # noqa: F401
        from shoal.jobs.kind import import_for_drivers

        import_for_drivers()
        # Without `gc.freeze`, the garbage collection of a driver would copy the memory that it shares with this
        # process.
        gc.freeze()

    def _begin_torch(self) -> None:
        """Fork the template of PyTorch, if there is none."""
        server = os.getpid()

        def begin() -> None:
            self._leave(server)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the exit codes of the forked templates

        if self._torch is None and (forked := fork_template(begin)):
            with contextlib.suppress(OSError):  # no descriptor is left, or the template has ended
                template = TemplateOfTemplates(*forked)
                template.load([*TORCH_MODULES, "shoal.training.pytorch.worker", *_modules_of(_ALWAYS)])
                self._selector.register(template.channel.socket, selectors.EVENT_READ)
                self._torch = template

    def _note_session(self) -> None:
        assert self._torch is not None
        try:
            driver, session = self._torch.session()
        except (EOFError, OSError):
            self._selector.unregister(self._torch.channel.socket)
            self._torch.channel.close()
            self._torch = None
            return
        if NO_PROCESS in (driver, session):
            return
        if driver in self._running:
            self._sessions[driver] = session
            self._ended.discard(session)
        else:
            self._ended.add(session)
            self._kill_left_processes()

    def _answer_request(self, request: dict[str, Any]) -> None:
        """Import the libraries of a driver and start it. A request without a driver names those to import meanwhile."""
        libraries = {*_ALWAYS, *request["libraries"]} if request["libraries"] else ()
        modules = _modules_of(libraries)
        if "torch" in libraries:
            self._begin_torch()
        if "id" not in request:
            self._wanted, self._creates_database = modules, MLFLOW_STORE in libraries
            return
        self._had_request = True
        with contextlib.suppress(OSError):  # no descriptor is left: the driver is refused
            self._import_modules()
            for module in modules:
                self._preload(module)
        self._start(request)

    def _start(self, request: dict[str, Any]) -> None:
        server, kills = os.getpid(), OomKills()
        torch = self._torch if "torch" in request["libraries"] else None
        try:
            with contextlib.ExitStack() as opened:
                log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                opened.callback(os.close, log)
                ours, theirs = map(opened.enter_context, socket.socketpair()) if torch else (None, None)
                pid = os.fork()
                if pid == 0:
                    if theirs:
                        theirs.close()
                    self._become_driver(server, request, log, ours)
                if torch and theirs:
                    with contextlib.suppress(OSError):  # the template has ended: the driver finds that out
                        torch.fork(pid, request["folder"], log, theirs, {DRIVER_TAG: str(pid), **_NO_TELEMETRY})
                        torch.load(_modules_of({*_ALWAYS, *request["libraries"]}))
        except OSError as error:  # no process, memory or descriptor is left; the drivers that run must go on
            self._answer({"id": request["id"], "refused": str(error)})
            return
        self._running[pid] = request["id"], kills
        self._ended.discard(pid)
        self._answer({"id": request["id"], "pid": pid})

    def _become_driver(
        self, server: int, request: dict[str, Any], log: int, template: socket.socket | None
    ) -> NoReturn:
        from shoal.jobs.driver import main as driver

        try:
            self._leave(server)
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(request["folder"])
            os.environ[DRIVER_TAG] = str(os.getpid())
            sys.argv = ["shoal.jobs.driver", *request["arguments"]]
            if numpy_random := sys.modules.get("numpy.random"):
                numpy_random.seed()  # otherwise NumPy would draw the same random numbers in all drivers
            code = driver.run(template)
            used = [module for module in PRELOADED if sys.modules.get(module)]
            # The line is shorter than 4096 bytes, so that the lines of several drivers do not mix.
            os.write(self._report_to, " ".join([*used, ""]).encode())
            os._exit(code)
        except BaseException:
            traceback.print_exc()  # the job's error names the last line of the log
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _leave(self, server: int) -> None:
        """Let this process, a fork, end with the server, and keep none of the server's pipes."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._answers)
        if self._torch:
            self._torch.channel.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def _create_database(self) -> None:
        """When MLflow is imported, let a fork create its database. If this fails, the first driver creates it."""
        if not self._creates_database or _DATABASE_MODULE not in sys.modules:
            return
        self._creates_database, server = False, os.getpid()
        try:
            self._database_creator = os.fork()
        except OSError:  # no process or memory is left
            return
        if self._database_creator:
            return
        try:
            from shoal.jobs import mlflow_run

            self._leave(server)
            os.nice(_NICE_OF_DATABASE)
            mlflow_run.create_default_database()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _preload(self, module: str) -> None:
        """Import a module, so that later drivers have it already."""
        if module not in PRELOADED or module in self._preloaded | self._excluded:
            return
        self._preloaded.add(module)
        with before_forks(), _late_streams():
            if self._had_request:
                _import(module)
            else:
                self._import_patiently(module)
        if thread_count() > 1:
            self._excluded.add(module)
        gc.freeze()

    def _import_patiently(self, module: str) -> None:
        """Import a module in a thread with a low priority. If a request waits for too long, restart without the import.

        This process does not lower its own priority, because it may not raise it again for the drivers.
        """

        def run() -> None:
            os.nice(_NICE)  # on Linux, this is the priority of the thread only
            _import(module)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        requested_at: float | None = None
        while thread.is_alive():
            thread.join(_PAUSE_S)
            if requested_at is None and select.select([0], [], [], 0)[0]:
                requested_at = time.monotonic()
            if requested_at is not None and time.monotonic() - requested_at > _IMPORT_PATIENCE_S:
                self._restart()
        # `join` returns before the kernel has ended the thread.
        until = time.monotonic() + _THREAD_END_S
        while thread_count() > 1 and time.monotonic() < until:
            time.sleep(0.001)

    def _restart(self) -> None:
        """Replace this process by a new server that has imported no libraries, but has the same process id and pipes.

        A fork copies only one thread, and a lock that another thread holds would never be released in the fork. So the
        server restarts if a library has started a thread, and does not import that library again. A request that waits
        stays in the pipe.
        """
        os.dup2(self._answers, 1)
        os.execv(sys.executable, python_command("-m", "shoal.jobs.driver.fork_server", *sorted(self._excluded)))

    def _report_ends(self) -> None:
        answers = []
        with contextlib.suppress(ChildProcessError):  # no child is left
            while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, code = child[0], os.waitstatus_to_exitcode(child[1])
                if pid == self._database_creator:
                    self._database_creator = None
                if pid in self._running:
                    driver, kills = self._running.pop(pid)
                    self._ended |= {pid, self._sessions.pop(pid, pid)}
                    killed = kills.told() if code == -signal.SIGKILL else ""
                    answers.append({"id": driver, "code": code, "why": killed and f"since it started, {killed}"})
        self._kill_left_processes()
        for answer in answers:
            self._answer(answer)

    def _kill_left_processes(self) -> None:
        """Kill the processes that ended drivers have left. When they end, this method is called again for their
        children."""
        try:
            me = psutil.Process()
            command, children = me.cmdline(), []
            if self._torch:
                with contextlib.suppress(psutil.NoSuchProcess):
                    children = psutil.Process(self._torch.pid).children(recursive=True)
            children += me.children()  # later, because a process whose parent ends meanwhile becomes one of these
        except OSError:
            return  # no file descriptor is free: the next call looks for these processes, too
        kept = {*self._running, self._database_creator, self._torch and self._torch.pid}
        for child in children:
            # User code may have set the variable of the tag to a text.
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                if child.pid not in kept and self._is_left(child, command):
                    child.kill()
        if not self._running:
            self._ended.clear()

    def _is_left(self, process: psutil.Process, command: Sequence[str]) -> bool:
        """Return whether a process belongs to a driver that has ended: it is in the session of the driver, or has
        inherited its tag. A fork in a session of its own shows neither, so it is left until no driver runs.

        Programs that shoal has detached, such as the supervisor of a node, have a session of their own and no tag.
        """
        tag = int(process.environ().get(DRIVER_TAG, 0))
        if {os.getsid(process.pid), tag} & self._ended:
            return True
        shown = process.cmdline()
        return not self._running and (tag > 0 or shown == command or " ".join(shown).startswith(WORKER))

    def _answer(self, answer: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")


def _modules_of(libraries: Collection[str]) -> list[str]:
    return [module for module in PRELOADED if _library_of(module) in libraries]


def _library_of(module: str) -> str:
    """Return the name by which requests ask for a module. MLflow's stores have a name of their own, because a driver
    needs seconds to import them, and does not need them for an MLflow server."""
    return MLFLOW_STORE if module.startswith(MLFLOW_STORE) else module.partition(".")[0]


def _import(module: str) -> None:
    with contextlib.suppress(Exception):
        if module in _LEAN:
            import_lean([module])
        else:
            importlib.import_module(module)


class _LateStream:
    """Text stream that looks up `sys.stdout` or `sys.stderr` at each use.

    Libraries such as Ray keep the stream that they find when they are imported. A driver later replaces `sys.stdout`
    and `sys.stderr` by streams that write to the job's log without secrets, and libraries have to use these.
    """

    def __init__(self, name: str, original: TextIO) -> None:
        self._name = name
        self._original = original

    def __getattr__(self, attribute: str) -> Any:
        current = getattr(sys, self._name)
        return getattr(self._original if current is self else current, attribute)


@contextlib.contextmanager
def _late_streams() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` by :class:`_LateStream` objects while the `with` block imports modules."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _LateStream("stdout", out), _LateStream("stderr", err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


if __name__ == "__main__":
    ForkServer(sys.argv[1:]).serve()
    os._exit(0)
