"""The server on a pool's head that runs the drivers of jobs, asked by the client that asks Ray's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import psutil
import pytest

from shoal.boosting_libraries import MLFLOW_STORE
from shoal.errors import JobError
from shoal.jobs.files.storage import default_uri
from shoal.jobs.reconcile.look import JobClient
from shoal.pool.backends.local import job_server
from shoal.pool.backends.local.backend import LocalBackend
from shoal.pool.backends.local.job_server import ForkServer, JobServer, Process
from shoal.pool.backends.ray_http import RayJob
from shoal.pool.endpoint import LIBRARIES, driver_arguments, driver_command
from shoal.pool.spec import PoolSpec
from shoal.pool.supervisor import load_node
from shoal.state.home import open_locked
from shoal.state.schema import Node
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

TOKEN = "let-me-in"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    # In a process with several threads, the fork server is a program of its own, and no fork of pytest, whose streams
    # pytest has replaced.
    closed = threading.Event()
    thread = threading.Thread(target=closed.wait)
    thread.start()
    server = JobServer(tmp_path, TOKEN)
    yield server
    server.close()
    closed.set()
    thread.join()


@pytest.fixture
def client(server: JobServer) -> JobClient:
    return JobClient(server.url, TOKEN)


def ended(client: JobClient, job: str) -> RayJob:
    return wait_until(lambda: (status := client.status(job)) and status.ended and status, f"the end of {job}")


def fork_servers() -> list[psutil.Process]:
    """The fork servers that this process has started and that still run."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "shoal.jobs.driver.fork_server" in child.cmdline()]


def test_a_command_runs_once_and_its_end_output_and_libraries_are_kept(
    fresh_home: Path, server: JobServer, client: JobClient, tmp_path: Path
) -> None:
    command = ["sh", "-c", 'pwd; echo "$0" >&2; read line; exit 3', "it's"]
    assert client.submit(command, "a-1", {})
    assert not client.submit(command, "a-1", {})  # it reads the end of its input at once
    assert ended(client, "a-1") == RayJob("FAILED", None, 3)
    assert client.logs("a-1") == f"{tmp_path}\nit's\n"
    assert client.submit(["true"], "a-2", {LIBRARIES: "numpy ray"})
    assert ended(client, "a-2") == RayJob("SUCCEEDED", None, 0)
    assert not client.stop("a-2")
    assert client.delete("a-2")
    assert client.status("a-2") is None
    assert not server.busy()


def test_a_command_is_stopped_by_sigterm_and_then_with_its_children_by_sigkill(
    server: JobServer, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(["sleep", "600"], "gentle", {})
    assert client.stop("gentle")
    assert ended(client, "gentle") == RayJob("STOPPED", None, -signal.SIGTERM)
    monkeypatch.setattr("shoal.pool.backends.local.job_server.DRIVER_STOP_PATIENCE", 0.2)
    client.submit(["sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait; wait"], "stubborn", {})
    child = int(wait_until(lambda: client.logs("stubborn").strip(), "its child"))
    assert server.busy()
    assert client.stop("stubborn")
    assert ended(client, "stubborn") == RayJob("STOPPED", None, -signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{child}"), "the end of its child")


def test_drivers_are_forks_that_end_with_the_server(
    fresh_home: Path, server: JobServer, client: JobClient, tmp_path: Path
) -> None:
    # There is no such job, as the driver finds out after it has opened the store.
    assert client.submit(driver_command(sys.executable, "nothing", "1"), "d-1", {})
    assert ended(client, "d-1") == RayJob("SUCCEEDED", None, 0)
    assert "nothing to do" in client.logs("d-1")
    [forks] = wait_until(lambda: len(found := fork_servers()) == 1 and found, "the end of the other tests' servers")
    assert forks.num_threads() == 1
    server.close()
    forks.wait(30)


def test_driver_that_cannot_start_is_refused_with_the_reason(fresh_home: Path, request: pytest.FixtureRequest) -> None:
    before = set(psutil.Process().children())
    server, client = request.getfixturevalue("server"), request.getfixturevalue("client")
    [forks] = set(psutil.Process().children()) - before
    assert client.submit(["/no/such/program"], "c-1", {})
    failed = ended(client, "c-1")
    assert failed.exit_code is None
    assert failed.message == (
        "the head cannot start another process: [Errno 2] No such file or directory: '/no/such/program'"
    )
    assert client.submit(driver_command(sys.executable, "nothing", "1"), "d-0", {})
    assert ended(client, "d-0") == RayJob("SUCCEEDED", None, 0)  # so the fork server has done its imports
    limits = forks.rlimit(psutil.RLIMIT_NOFILE)
    forks.rlimit(psutil.RLIMIT_NOFILE, (0, limits[1]))
    assert client.submit(driver_command(sys.executable, "nothing", "1"), "d-1", {LIBRARIES: "torch"})
    failed = ended(client, "d-1")
    assert failed.status == "FAILED"
    assert failed.exit_code is None
    assert failed.message
    assert failed.message.startswith("the head cannot start another process: [Errno 24] Too many open files")
    assert client.logs("d-1") == ""
    assert not client.stop("d-1")
    assert not server.busy()
    forks.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert client.submit(driver_command(sys.executable, "nothing", "1"), "d-2", {})
    assert ended(client, "d-2") == RayJob("SUCCEEDED", None, 0)
    assert set(psutil.Process().children()) - before == {forks}


HEAD = """
import sys
from pathlib import Path
from shoal import own_pauses
from shoal.pool.backends.local.job_server import JobServer
from shoal.state.home import open_locked

own_pauses.waited_since(0.0)  # every supervisor does, which starts a thread
with open_locked(Path("lock"), wait=False) as is_mine:
    assert is_mine
    server = JobServer(Path.cwd(), sys.argv[1])
print(server.url, flush=True)
sys.stdin.read()
server.close()
"""


def test_the_fork_server_is_a_fork_of_a_head_with_one_thread_and_is_replaced_when_it_ends(
    fresh_home: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HEAD, TOKEN]
    head = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert head.stdin and head.stdout
        client = JobClient(head.stdout.readline().strip(), TOKEN)
        [forks] = psutil.Process(head.pid).children()
        assert forks.cmdline() == command
        assert client.submit(driver_command(sys.executable, "nothing", "1"), "d-1", {})
        assert ended(client, "d-1") == RayJob("SUCCEEDED", None, 0)
        # The fork closes its copies of the head's descriptors before it answers a request.
        with open_locked(tmp_path / "lock", wait=False) as is_mine:
            assert is_mine, "the fork keeps a lock of the head"
        forks.kill()
        wait_until(lambda: not forks.is_running(), "its end")
        assert client.submit(driver_command(sys.executable, "nothing", "1"), "d-2", {})
        assert ended(client, "d-2") == RayJob("SUCCEEDED", None, 0)
        [forks] = psutil.Process(head.pid).children()
        assert "shoal.jobs.driver.fork_server" in forks.cmdline()
        head.stdin.close()
        assert head.wait(30) == 0
        wait_until(lambda: not forks.is_running(), "the end of the fork server with its head")
    finally:
        head.kill()
        head.wait()


@pytest.fixture
def fork_server(
    fresh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Callable[..., dict[str, Any]]]:
    """A fork server whose drivers run the given code, which may `say` a value; its times are short. The parameter is
    its first request."""
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)  # tests before this one may have set it
    main = tmp_path / "main.py"
    main.write_text(FORK_SERVER)
    process = subprocess.Popen([sys.executable, str(main)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    served = 0
    if first := getattr(request, "param", None):
        process.stdin.write(json.dumps(first) + "\n")
        process.stdin.flush()

    def run(code: str, code_of_exit: int = 0, libraries: Sequence[str] = ()) -> dict[str, Any]:
        nonlocal served
        served += 1
        log = tmp_path / f"{served}.log"
        (tmp_path / f"{served}.py").write_text(code)
        asked = {"id": str(served), "arguments": [f"{served}.py"], "libraries": libraries}
        process.stdin.write(json.dumps({**asked, "folder": str(tmp_path), "log": str(log)}) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == str(served)
        assert json.loads(process.stdout.readline()) == {"id": str(served), "code": code_of_exit, "why": ""}
        if code_of_exit:
            return {"log": log.read_text()}
        return json.loads((tmp_path / f"{served}.json").read_text())

    yield run
    process.stdin.close()
    assert process.wait(30) == 0


LEAVE = """
import os, subprocess, sys, threading
from pathlib import Path
from shoal.training.host.own_process import WORKER, set_title

def worker_in_a_session():
    os.setsid()
    set_title(f"{WORKER} 0 of 1")

def left(start):
    read, write = os.pipe()
    if not (first := os.fork()):
        start()
        if not os.fork():
            os.write(write, str(os.getpid()).encode())
            threading.Event().wait()
        os._exit(0)
    os.waitpid(first, 0)
    return int(os.read(read, 100))

said["left"] = [left(lambda: None), left(os.setsid), subprocess.Popen(["sleep", "600"], start_new_session=True).pid]
said["left"].append(left(worker_in_a_session))
said["left"].append(int(subprocess.check_output("setsid sleep 600 > /dev/null & echo $!", shell=True)))
said["parents"] = [int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in said["left"]]
said["server"] = os.getppid()
"""


def test_failed_fork_and_the_end_of_a_driver_end_nothing_of_another_driver(
    fresh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, no_forks = tmp_path / "main.py", tmp_path / "no-forks"
    main.write_text(FORK_SERVER)
    start = lambda requests, answers: subprocess.Popen([sys.executable, main], stdin=requests, stdout=answers)  # noqa: E731
    monkeypatch.setattr(job_server, "_start_fork_server", start)
    started = "Path('new').write_text(str(said['left']))\nos.rename('new', 'left')"
    (tmp_path / "wait.py").write_text(f"{LEAVE}\n{started}\nopen('go').read()")
    (tmp_path / "last.py").write_text("open('go').read()")
    (tmp_path / "end.py").write_text("")
    os.mkfifo(tmp_path / "go")
    server = ForkServer()

    def run(name: str, program: str) -> Process:
        return server.start(name, [program], [], tmp_path, tmp_path / f"{name}.log")

    try:
        running = run("running", "wait.py")
        assert running.pid
        wait_until((tmp_path / "left").exists, "what the driver starts")
        left = json.loads((tmp_path / "left").read_text())
        no_forks.touch()
        refused = run("refused", "end.py")
        wait_until(lambda: refused.poll() is not None, "the refusal")
        assert refused.start_error == "the head cannot start another process: [Errno 11] no room"
        with pytest.raises(ProcessLookupError, match="no room"):
            refused.pid  # noqa: B018
        no_forks.unlink()
        later = run("later", "end.py")
        assert wait_until(lambda: later.poll() is not None and (later.poll(), later.start_error), "its end") == (0, "")
        assert running.poll() is None
        assert run("other", "end.py").pid
        wait_until(lambda: not server._drivers.get("other"), "the end of the other driver")
        assert all(map(psutil.pid_exists, left))
        assert server.is_current()
        (tmp_path / "go").write_text("")
        assert wait_until(lambda: running.poll() is not None and str(running.poll()), "its end") == "0"
        wait_until(lambda: not any(map(psutil.pid_exists, left)), "the end of what the driver has left")
        last = run("last", "last.py")
        assert last.pid
        server.close()
        wait_until(lambda: last.poll() is not None, "its end with the fork server")
        assert last.why_ended == "the process that forks the drivers of the head was killed by SIGKILL"
    finally:
        server.close()


DETACH = """
from shoal.pool.backends.local.backend import inherited_environment
from shoal.pool.backends.local.processes import spawn_detached
spawn_detached(["/bin/sh", "-c", "echo $$ > detached; exec sleep 600"], env=inherited_environment(), log=Path("d.log"))
"""


@pytest.fixture
def no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template cannot be forked for drivers, because its module has started a thread."""
    (tmp_path / "threaded.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("TORCH", "threaded")


def test_what_a_driver_leaves_ends_with_it_but_for_programs_that_shoal_detaches(
    fresh_home: Path, no_template: None, fork_server: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    said = fork_server(LEAVE + DETACH + "\nsaid['template'] = template.recv(1).decode()", libraries=["torch"])
    assert said["template"] == ""
    assert len(said["left"]) == 5
    file = tmp_path / "detached"
    detached = psutil.Process(int(wait_until(lambda: file.exists() and file.read_text(), "its start")))
    try:
        wait_until(lambda: not any(map(psutil.pid_exists, said["left"])), "the end of what the driver has left")
        assert detached.is_running()
    finally:
        detached.kill()
    wait_until(lambda: not detached.is_running(), "the fork server to reap the detached program")
    assert said["parents"].count(said["server"]) == 4


def test_error_before_a_driver_has_begun_is_in_its_log(fork_server: Callable[..., dict[str, Any]]) -> None:
    log = fork_server("raise OSError('no thread is left')", code_of_exit=1)
    assert log["log"].splitlines()[-1] == "OSError: no thread is left"


FORK_SERVER = """
import json, os, sys, threading
from pathlib import Path
from shoal.jobs.driver import fork_server, main

def run(template):
    path = Path(sys.argv[1])
    names = {"said": {}, "template": template}
    exec(path.read_text(), names)
    path.with_suffix(".json").write_text(json.dumps(names["said"]))
    return 0

def fork(really=os.fork):
    if Path(__file__).with_name("no-forks").exists():
        raise BlockingIOError(11, "no room")
    return really()

os.fork = fork
main.run = run
fork_server._NICE = fork_server._NICE_OF_DATABASE = 0  # on a busy machine, imports would take minutes
fork_server.TORCH_MODULES = [os.environ.get("TORCH", "torch")]
fork_server.FORK_SERVER_IDLE_S = float(os.environ.get("IDLE_S", "300"))
if "STUCK" in os.environ:
    fork_server._IMPORT_PATIENCE_S = 0
    really = fork_server._import
    here = threading.main_thread()
    fork_server._import = lambda name: really(name) if threading.current_thread() is here else threading.Event().wait()
# A restart starts this file again, not the module.
execv = os.execv
os.execv = lambda path, command: execv(path, [path, __file__, *command[4:]])
fork_server.ForkServer(sys.argv[1:]).serve()
os._exit(0)
"""

LOOK = """
import os, random, sys
said["loaded"] = [m for m in ("numpy", "ray", "mlflow", "xgboost", "leftover") if m in sys.modules]
said["threads"] = len(os.listdir(f"/proc/{os.getppid()}/task"))
said["variables"] = [v for v in os.environ if v in ("OPENBLAS_NUM_THREADS", "MLFLOW_DISABLE_TELEMETRY", "LEFTOVER")]
said["folder"] = os.getcwd()
"""


def loaded(fork_server: Callable[[str], dict[str, Any]], *modules: str) -> dict[str, Any]:
    """Wait until the fork server has imported these modules. It imports them while nobody asks anything of it."""
    look = lambda: (now := fork_server(LOOK))["loaded"] == list(modules) and now  # noqa: E731
    return wait_until(look, "the imports", every=0.5)


def test_the_fork_server_imports_the_libraries_that_drivers_have_used_and_nothing_else_of_them(
    fork_server: Callable[[str], dict[str, Any]],
) -> None:
    assert fork_server(LOOK)["loaded"] == []
    fork_server(
        "import os, sys, types, numpy, mlflow, ray\n"
        "numpy.leftover = os.environ['LEFTOVER'] = 'secret'\n"
        "sys.modules['leftover'] = types.ModuleType('leftover')"
    )
    after = loaded(fork_server, "numpy", "ray", "mlflow")
    assert after["threads"] == 1
    assert after["variables"] == []
    assert fork_server("import numpy; said['leftover'] = hasattr(numpy, 'leftover')") == {"leftover": False}


BEFORE_THE_FIRST_JOB = {"libraries": ["mlflow", MLFLOW_STORE, "xgboost"]}


@pytest.mark.parametrize("fork_server", [BEFORE_THE_FIRST_JOB], indirect=True)
def test_the_fork_server_imports_libraries_and_creates_the_database_before_the_first_driver(
    fork_server: Callable[..., dict[str, Any]],
) -> None:
    database = Path(default_uri().removeprefix("sqlite:///"))
    wait_until(database.exists, "the database")
    first = fork_server(f"{LOOK}said['store'] = {MLFLOW_STORE!r} in sys.modules")
    assert first["loaded"] == ["numpy", "mlflow", "xgboost"]
    assert first["store"]
    assert first["threads"] == 1
    assert first["variables"] == []
    # The database is complete: MLflow creates no tables.
    opened = fork_server(
        "import mlflow.store.db.utils\n"
        "from shoal.jobs.files.storage import default_uri\n"
        "from shoal.jobs import mlflow_run\n"
        "mlflow.store.db.utils._initialize_tables = None\n"
        "said['experiments'] = len(mlflow_run.connect(default_uri()).search_experiments())"
    )
    assert opened == {"experiments": 1}


@pytest.fixture
def stuck_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports with a low priority do not end."""
    monkeypatch.setenv("STUCK", "1")


@pytest.mark.parametrize("fork_server", [BEFORE_THE_FIRST_JOB], indirect=True)
def test_a_request_does_not_wait_for_an_import_with_a_low_priority(
    stuck_imports: None, fork_server: Callable[..., dict[str, Any]]
) -> None:
    assert fork_server(LOOK, libraries=["ray"])["loaded"] == ["numpy", "ray"]


def test_the_fork_server_imports_the_libraries_of_a_driver_once_for_it_and_all_later_ones(
    fork_server: Callable[..., dict[str, Any]],
) -> None:
    address = "import xgboost, os; said['module'] = id(xgboost); said['server'] = os.getppid()"
    first = fork_server(LOOK, libraries=["xgboost"])
    assert first["loaded"] == ["numpy", "xgboost"]
    assert fork_server(LOOK)["loaded"] == ["numpy", "xgboost"]
    assert fork_server(address) == fork_server(address)


@pytest.mark.parametrize(
    ("options", "libraries"),
    [
        ("libraries=lightgbm,mlflow", {"lightgbm", "mlflow", MLFLOW_STORE, "ray"}),
        ("ray=false&max_nodes=1&libraries=xgboost", {"xgboost"}),
        ("", set()),
        ("ray=false&max_nodes=1", set()),
    ],
)
def test_a_head_imports_the_libraries_of_its_pool(
    fresh_home: Path, monkeypatch: pytest.MonkeyPatch, options: str, libraries: set[str]
) -> None:
    asked: list[set[str]] = []

    def job_server(folder: Path, token: str, libraries: Sequence[str]) -> MagicMock:
        asked.append(set(libraries))
        return MagicMock()

    monkeypatch.setattr("shoal.pool.supervisor.JobServer", job_server)
    monkeypatch.setattr("shoal.pool.backends.local.raylet.Raylet", MagicMock())
    spec = PoolSpec.parse(f"local://imports?{options}")
    LocalBackend().prepare(spec)
    load_node(spec)(Node(id="1", name="head", is_head=True, cpus=1), spec, None, fresh_home).stop()
    assert asked == [libraries]


WORKER_OF_A_TEMPLATE = """
import json, os
from shoal.training.gang.child_processes import forked, import_ahead, use_template
from shoal.training.gang.placement import GangShape

def work(say):
    import json, os, random, sys, threading
    said = {"imported": "torch" in sys.modules, "folder": os.getcwd(), "driver": os.environ["SHOAL_DRIVER_PID"]}
    said["template"] = int(open(f"/proc/{os.getppid()}/stat").read().split()[3])
    said["draws"] = [random.random(), sys.modules["torch"].rand(1).item()]
    if not (left := os.fork()):
        threading.Event().wait()
    os.write(say, json.dumps(said | {"left": [os.getpid(), left]}).encode())
    threading.Event().wait()

use_template(template)
import_ahead(lambda: GangShape(1, 1), ["torch"])
hear, say = os.pipe()
assert forked(work, (), [say])
said.update(json.loads(os.read(hear, 10000)), pid=os.getpid())
"""


@pytest.mark.parametrize("fork_server", [{"libraries": ["torch"]}], indirect=True)
def test_the_workers_of_all_drivers_are_forked_from_one_process_that_has_imported_pytorch(
    fork_server: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def trained() -> dict[str, Any]:
        said = fork_server(WORKER_OF_A_TEMPLATE, libraries=["torch"])
        assert said["imported"]
        assert (said["folder"], said["driver"]) == (str(tmp_path), str(said["pid"]))
        wait_until(lambda: not any(map(psutil.pid_exists, said["left"])), "the end of the driver's workers")
        return said

    one, other = trained(), trained()
    assert one["template"] == other["template"]
    assert not set(one["draws"]) & set(other["draws"])
    psutil.Process(one["template"]).kill()
    wait_until(lambda: not psutil.pid_exists(one["template"]), "the end of the template")
    assert trained()["template"] != one["template"]


def test_forked_drivers_draw_different_random_numbers(fork_server: Callable[[str], dict[str, Any]]) -> None:
    draw = "import random, numpy.random; said['drawn'] = [random.random(), numpy.random.random()]"
    fork_server(draw)
    loaded(fork_server, "numpy")
    one, other = (fork_server(draw)["drawn"] for _ in range(2))
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_output_of_a_library_imported_ahead_goes_to_the_stream_of_the_driver(
    fork_server: Callable[[str], dict[str, Any]],
) -> None:
    fork_server("import ray")
    loaded(fork_server, "ray")
    said = fork_server(
        "import io, logging, sys, ray\nsys.stderr = io.StringIO()\n"
        "logging.getLogger('ray').error('a secret')\nsaid['text'] = sys.stderr.getvalue()"
    )
    assert "a secret" in said["text"]


def test_a_driver_can_import_a_library_with_the_packages_that_the_fork_server_has_left_out(
    fork_server: Callable[[str], dict[str, Any]],
) -> None:
    pytest.importorskip("sklearn")
    has_sklearn = "from xgboost.compat import SKLEARN_INSTALLED\nsaid['sklearn'] = SKLEARN_INSTALLED"
    fork_server("import xgboost")
    loaded(fork_server, "numpy", "xgboost")
    assert fork_server(has_sklearn) == {"sklearn": False}
    complete = f"from shoal.training.host.imports import complete_libraries\ncomplete_libraries()\n{has_sklearn}"
    assert fork_server(complete) == {"sklearn": True}


def test_an_idle_fork_server_restarts_and_frees_the_libraries(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("IDLE_S", "2")
    run = request.getfixturevalue("fork_server")
    server = psutil.Process(run("import os; said['server'] = os.getppid()")["server"])
    has_numpy = lambda: any("numpy" in part.path for part in server.memory_maps())  # noqa: E731
    run("import numpy")
    wait_until(has_numpy, "the import")
    wait_until(lambda: not has_numpy(), "the restart")
    assert run(LOOK)["loaded"] == []


def test_a_request_needs_the_token_and_must_be_small(server: JobServer, client: JobClient) -> None:
    with pytest.raises(JobError, match="refused the token"):
        JobClient(server.url, "guessed").submit(["true"], "a-1", {})
    with pytest.raises(JobError, match="413"):
        client.submit(["echo", "x" * 2**23], "a-1", {})  # more than sockets buffer
    assert client.status("a-1") is None
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.post(f"{server.url}/api/jobs/", content=b"{", headers=authorized).status_code == 400
    assert httpx.post(f"{server.url}/api/jobs/", json={}, headers=authorized).status_code == 400
    assert httpx.delete(f"{server.url}/api/jobs/a-1/logs", headers=authorized).status_code == 404


def is_hung_up(stranger: socket.socket) -> bool:
    """Wait for the end of a connection; what was sent and not read turns it into a reset."""
    try:
        return not b"".join(iter(lambda: stranger.recv(4096), b"")).startswith(b"HTTP/1.0 2")
    except ConnectionError:
        return True


def test_connections_without_the_token_are_few_and_short(
    server: JobServer, client: JobClient, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(100)]
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"G")  # the beginning of a request, whose rest never comes
        for stranger in strangers[:36]:
            assert is_hung_up(stranger)
        assert client.submit(["true"], "a-1", {})
        monkeypatch.setattr("shoal.pool.backends.local.job_server.HEAD_TOKEN_TIMEOUT", 0)
        for stranger in strangers:
            assert is_hung_up(stranger)
    with socket.create_connection(address, timeout=30) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\nContent-Length: x\r\n\r\n")
        assert is_hung_up(stranger)
    assert capfd.readouterr().err == ""


def test_only_drivers_of_the_heads_own_environment_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = driver_command(sys.executable, "job", "1")
    assert driver_arguments(mine) == ["job", "1"]
    assert driver_arguments(driver_command("/another/bin/python", "job", "1")) is None
    assert driver_arguments(["sh", "-c", "true"]) is None
    monkeypatch.setenv("SHOAL_PYTHON", "/another/bin/python")
    assert driver_arguments(mine) is None
