from __future__ import annotations

import os
import subprocess

from shoal.os_processes import ProcessId
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.processes import NODE_TAG
from tests.support.waiting import wait_until


def test_a_process_is_not_its_pid():
    me = ProcessId.mine()
    assert me.alive()
    assert ProcessId.from_json(me.to_json()) == me
    assert not ProcessId(me.boot, me.pid, me.start + 1, me.host).alive()
    assert not ProcessId("another boot", me.pid, me.start, me.host).alive()


def test_a_zombie_has_ended():
    child = subprocess.Popen(["sleep", "1000"])
    identity = ProcessId.of(child.pid)
    child.kill()
    wait_until(lambda: not identity.alive(), "the zombie seen as ended")
    child.wait()


def test_what_belongs_to_a_node(tmp_path):
    """By tag and by what it writes; somebody who reads a log there or removes the folder is left alone."""
    folder = tmp_path / "node"
    folder.mkdir()
    log = folder / "log"
    log.touch()
    tagged = subprocess.Popen(["sleep", "1000"], env={NODE_TAG: "abc"})
    other = subprocess.Popen(["sleep", "1000"], env={NODE_TAG: "abcd"})
    with log.open("a") as sink, log.open() as source:
        writer = subprocess.Popen(["sleep", "1000"], stdout=sink)
        reader = subprocess.Popen(["sleep", "1000"], stdin=source)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        found = wait_until(lambda: processes.of_node("abc", [folder], None), "what belongs to it")
        assert {process.pid for process in found} == {tagged.pid, writer.pid}
        assert processes.end_all(lambda: processes.of_node("abc", [folder], None), patience=10) == []
        assert other.poll() is None
        assert reader.poll() is None
    finally:
        os.close(descriptor)
        for process in (tagged, other, writer, reader):
            process.kill()
            process.wait()
