"""What another user of the machine can do to a pool: a child that drops to an unprivileged user tries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.errors import PoolDownError
from shoal.pool.api import ComputePool
from shoal.pool.backends.local.backend import node_folder
from shoal.pool.endpoint import NO_GCS, Endpoint
from shoal.pool.reconciling import sweep
from shoal.state import Store, home
from tests.support.pool_processes import node_rows, nothing_left

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, who then tries")

NOBODY = 65534

_BECOME_NOBODY = f"""
import errno, fcntl, json, os, socket, stat, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""

_TRY_ALL = """
def attempts(path):
    yield "listed", lambda: os.listdir(path)
    yield "read", lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    yield "written", lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    yield "given a file", lambda: os.close(os.open(os.path.join(path, "x"), os.O_WRONLY | os.O_CREAT))
    yield "renamed", lambda: os.rename(path, path + ".x")
    yield "connected to", lambda: connect(path)

def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)

done = []
for path in json.load(sys.stdin):
    for what, act in attempts(path):
        try:
            act()
        except OSError:
            continue
        done.append(f"{path} can be {what}")
json.dump(done, sys.stdout)
"""

_SQUAT = """
turns = sys.argv[1]
os.mkdir(turns, 0o777)
held = [open(os.path.join(turns, f"start{turn}.lock"), "w") for turn in range(256)]
for file in held:
    os.chmod(file.name, 0o666)
    fcntl.flock(file, fcntl.LOCK_EX)
for link, target in json.loads(sys.argv[2]).items():
    os.makedirs(os.path.dirname(link), exist_ok=True)
    os.symlink(target, link)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.mark.ray
def test_nothing_of_a_live_pool_is_open_to_another_user(real_pool):
    """Files and sockets, by their paths: finding them out is the smallest of obstacles."""
    tree = [str(home()), *below(home())]
    for node in node_rows():
        folder = node_folder(node.id)
        tree += [str(folder.parent), str(folder), *below(folder)]
    sockets = [path for path in tree if Path(path).is_socket()]
    assert len(sockets) >= 2  # those of the raylet and of the object store
    assert any(path.endswith("/token") for path in tree)
    child = subprocess.run(
        [sys.executable, "-I", "-c", _BECOME_NOBODY + _TRY_ALL],
        input=json.dumps(tree),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(child.stdout) == []


def below(folder: Path) -> Iterator[str]:
    for above, folders, files in os.walk(folder):
        yield from (os.path.join(above, name) for name in (*folders, *files))


@contextmanager
def squatting(turns: Path, links: dict[Path, Path]) -> Iterator[None]:
    """Another user takes the place of the locks and holds all, and plants symlinks."""
    planted = json.dumps({str(link): str(target) for link, target in links.items()})
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", _BECOME_NOBODY + _SQUAT, str(turns), planted],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "done\n"
        yield
    finally:
        child.communicate("")


def test_planted_folders_and_symlinks_delete_nothing_and_block_nobody(temp, tiny, tmp_path):
    documents = tmp_path / "Documents"
    (documents / "0123456789").mkdir(parents=True)
    (documents / "0123456789" / "letter").write_text("dear")
    with squatting(temp / f"shoal-turns-{os.geteuid()}", {temp / "shoal-00000000": documents}):
        pool = ComputePool("local://hostile?max_nodes=2").up()
        assert pool.scale(2) is True
        (node, _) = node_rows()
        assert node_folder(node.id).parent.stat().st_mode & 0o777 == 0o700
        assert sweep(Store()) == []
        pool.down()
        nothing_left()
        assert sweep(Store()) == []
    assert (documents / "0123456789" / "letter").read_text() == "dear"


_LOOK_AT_PROCESSES = (
    """
import psutil
from pathlib import Path
from shoal.pool.backends.local import processes
"""
    + _BECOME_NOBODY
    + """
print(os.access("/proc/1/stat", os.R_OK), len(processes.of_node("0123456789", [Path("/tmp/0123456789")], None)))
"""
)


def test_processes_of_other_users_that_proc_hides_are_passed_over():
    mounted = 'mount -t proc -o hidepid=1 proc /proc && exec "$0" "$@"'
    alone = ["unshare", "--mount", "sh", "-c", mounted]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("/proc cannot be mounted with hidepid=1 here")
    look = [*alone, sys.executable, "-c", _LOOK_AT_PROCESSES]
    done = subprocess.run(look, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False 0\n"


_END_A_NODE = (
    """
from shoal.pool.backends.interface import NodeRef
from shoal.pool.backends.local.backend import LocalBackend
from shoal.os_processes import ProcessId
"""
    + _BECOME_NOBODY
    + """
assert os.geteuid() != 0
print(LocalBackend().end(None, [NodeRef("a", "p-0", "p", 1, ProcessId.of(int(sys.argv[1])))]))
"""
)


def test_a_clean_up_leaves_the_nodes_of_another_user_and_says_so():
    with subprocess.Popen(["sleep", "60"]) as supervisor:
        try:
            end = [sys.executable, "-c", _END_A_NODE, str(supervisor.pid)]
            done = subprocess.run(end, capture_output=True, text=True, check=False)
            assert supervisor.poll() is None
        finally:
            supervisor.kill()
    assert (
        done.stdout
        == f"{{'a': 'its supervisor (pid {supervisor.pid}) belongs to another user, whose shoal ends it'}}\n"
    ), done


def test_a_user_who_did_not_start_the_pool_is_told_so(tmp_path: Path):
    endpoint = Endpoint("http://127.0.0.1:1", NO_GCS, tmp_path / "token")
    with pytest.raises(PoolDownError, match=r"another user, .*has started it.* use a ray:// pool"):
        endpoint.token()
