"""Which host a process is on: the same after it was renamed, another one in each container."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import os_processes
from tests.support import another_host as otherhost

_PRINT = "from shoal.os_processes import host_id, hostname; print(hostname(), host_id())"


@pytest.fixture
def uncached() -> Iterator[None]:
    os_processes.host_id.cache_clear()
    yield
    os_processes.host_id.cache_clear()


def said_by(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.processes
def test_the_identity_survives_a_change_of_hostname():
    if subprocess.run(["unshare", "--uts", "hostname", "renamed"], capture_output=True, check=False).returncode:
        pytest.skip("a host cannot be renamed here: `unshare --uts hostname renamed` is refused")

    name, identity = said_by("unshare", "--uts", "sh", "-c", f'hostname renamed && exec {sys.executable} -c "{_PRINT}"')

    assert name == "renamed" != os_processes.hostname()
    assert identity == os_processes.host_id()


@pytest.mark.processes
def test_containers_of_one_image_differ():
    otherhost.required()

    identity = otherhost.python("import json; from shoal.os_processes import host_id; print(json.dumps(host_id()))")

    assert identity != os_processes.host_id()


def test_two_pid_namespaces_differ(uncached, monkeypatch):
    """Their inodes: two that follow each other may get the same one, so they are told here."""
    found = set()
    for inode in (4026532001, 4026532002):
        monkeypatch.setattr(os_processes, "namespace", lambda kind, inode=inode: f"{kind}:[{inode}]")
        os_processes.host_id.cache_clear()
        found.add(os_processes.host_id())
    assert len(found) == 2


def test_without_a_machine_id_the_hostname_counts(uncached, monkeypatch, tmp_path: Path):
    (tmp_path / "machine-id").write_text("uninitialized\n")  # an image before its first boot
    monkeypatch.setattr(os_processes, "_MACHINE_IDS", (str(tmp_path / "machine-id"), str(tmp_path / "absent")))
    found = set()
    for name in ("a", "b", "a"):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        os_processes.host_id.cache_clear()
        found.add(os_processes.host_id())
    assert len(found) == 2


def test_the_machine_id_itself_is_not_published():
    machine_id = os_processes._machine_id()
    if machine_id is None:
        pytest.skip("this host has no machine-id")
    assert machine_id not in os_processes.host_id()
