"""The command against a real pool: as processes where it changes the pool, in this process where it only looks."""

import signal
import subprocess

import pytest

from shoal.pool.holder import cli_holder
from tests.cli.conftest import SHOAL, document


@pytest.fixture
def clean_end(shoal_process):
    yield
    shoal_process("pool", "down", "cli")
    assert document(shoal_process("sweep", "--json").stdout) == {"did": [], "left": []}


@pytest.mark.ray
def test_the_life_of_a_pool(shoal_process, shoal, clean_end):
    def ask(*args, code=0):
        done = shoal_process(*args, "--json")
        assert done.returncode == code, done.stderr
        return document(done.stdout), done.stderr

    def look(*args):
        done = shoal(*args, "--json")
        assert done.exit_code == 0, done.output
        return document(done.stdout)

    up, progress = ask("pool", "up", "local://cli?max_nodes=3")
    assert (up["state"], len(up["active"])) == ("up", 1)
    assert up["last_operation"]["holder"] == cli_holder()
    assert progress.startswith("starting cli")
    assert look("pool", "describe")["max_nodes"] == 3
    scaled, progress = ask("pool", "scale", "2")
    assert len(scaled["active"]) == 2
    assert "1 of 2 nodes active, 1 pending" in progress
    listed = look("pool", "nodes", "cli")
    assert [node["cpus"] for node in listed["nodes"]] == [1, 1]
    shown = shoal_process("pool", "describe").stdout
    assert all(node["name"] in shown for node in listed["nodes"])
    refused, _ = ask("pool", "scale", "4", code=2)
    assert "MAX_NODES=3" in refused["error"]["message"]
    checks = {check["name"]: check["status"] for check in look("doctor")["checks"]}
    assert checks["reconciler"] == "ok"

    failed, _ = ask("pool", "scale", "3", "--rollback-after", "0.01", code=4)
    assert "rolled back to 2" in failed["error"]["message"]
    for number in (signal.SIGINT, signal.SIGTERM):
        assert _interrupted(number) == 130
        after = look("pool", "describe")
        assert (after["target"], len(after["active"]), after["pending"]) == (2, 2, [])
        assert after["last_operation"]["state"] == "rolled_back"

    assert ask("pool", "scale", "1")[0]["target"] == 1
    gone, _ = ask("pool", "down")
    assert (gone["state"], gone["active"], gone["leaving"]) == ("down", [], [])


def _interrupted(number):
    """Interrupt a scaling once its node is on the way; returns the exit code."""
    with subprocess.Popen([*SHOAL, "pool", "scale", "3"], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "pending" in line:
                break
        process.send_signal(number)
        assert "was rolled back" in process.stderr.read()
    return process.returncode
