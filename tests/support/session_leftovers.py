"""What a session of tests leaves behind, with the test that left it.

A process is known by the session's tag in its environment, by its `$SHOAL_HOME`, or, where it has overwritten its
environment as Ray's agents do, by a folder of ours in its command line. A port is open as long as its process lives.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.waiting import wait_until

TAG = "SHOAL_TEST_SESSION"

TREE = Path(__file__).parents[2]

_IN_HOME = ("airflow", "mlruns", "ray_results", ".airflow", ".mlflow", ".prefect", ".ray", ".shoal")
"""What shoal and its libraries may write into a home. Programs that run beside the tests write other files there."""

_watched_before: set[Path] = set()
_tree_before: set[str] = set()
_homes: dict[str, str] = {}
_roots: dict[str, str] = {}


def begin() -> None:
    """Tag this process, and with it all that it starts; note what lies in /, the home and the repository's root."""
    os.environ[TAG] = uuid.uuid4().hex
    _watched_before.update(_in_watched())
    _tree_before.update(_untracked())


def add_home(home: Path) -> None:
    """Note the home that the current test made."""
    _homes[str(home)] = _test_of(os.environ)


def remove_home(home: Path) -> None:
    """Remove a home with all its runtime roots."""
    for record in home.glob("runtime-*.json"):
        for root in json.loads(record.read_text()):
            _roots[root] = _homes.get(str(home), _test_of(os.environ))
            shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)


def remove_homes() -> None:
    """Remove all homes: a store that several tests share makes its home anew after the first of them removed it."""
    for home in list(_homes):
        remove_home(Path(home))


def found() -> list[str]:
    """Everything that should not be there at the end of a session, a sentence each.

    Processes get time to end, and so do files: sessions of other lanes run beside this one in the same tree.
    """
    with suppress(AssertionError):
        wait_until(lambda: not _processes() and not _files(), "the processes of the session to end", seconds=20)
    said = [f"{test} left the process {command}" for command, test in _processes()]
    said += [f"a test left {path}" for path in _files()]
    return said + [f"{test} left {path}" for path, test in (_homes | _roots).items() if os.path.lexists(path)]


def _files() -> list[str]:
    """New files and folders in /, in the home and in the repository's root."""
    found = [str(path) for path in sorted(_in_watched() - _watched_before)]
    return found + [str(TREE / name) for name in sorted(_untracked() - _tree_before)]


def _in_watched() -> set[Path]:
    return {*Path("/").iterdir(), *(path for name in _IN_HOME if (path := Path.home() / name).exists())}


def _untracked() -> set[str]:
    """Files and folders at the root of the repository that Git neither tracks nor ignores; none without Git.

    Below the root, developers add modules while tests run.
    """
    if shutil.which("git") is None:
        return set()
    command = ["git", "ls-files", "--others", "--directory", "--exclude-standard"]
    listed = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=False).stdout.splitlines()
    return {name for name in listed if "/" not in name.rstrip("/")}


def _processes() -> list[tuple[str, str]]:
    left = []
    for process in psutil.process_iter(["ppid", "status", "cmdline"]):
        if process.pid == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        command = " ".join(process.info["cmdline"] or ())
        if process.info["ppid"] == os.getpid() and "from multiprocessing." in command:
            continue  # its fork server and its tracker of resources, which end with this process
        try:
            environment = process.environ()
        except psutil.Error:  # of another user, or ended
            environment = {}
        folders = [folder for folder in (*_homes, *_roots) if f"{folder}/" in command]
        if home := environment.get("SHOAL_HOME"):
            folders.append(home)
        test = next((_homes.get(folder) or _roots.get(folder) for folder in folders), None)
        if test is None and environment.get(TAG) == os.environ[TAG]:
            test = _test_of(environment)
        if test is not None:
            left.append((f"{process.pid}: {command[:200]}", test))
    return left


def _test_of(environment: Mapping[str, str]) -> str:
    return environment.get("PYTEST_CURRENT_TEST", "the session").partition(" (")[0]  # without the phase
