"""The server on a pool's head that runs the drivers of jobs, asked by the client that asks Ray's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from shoal.errors import JobError
from shoal.jobs.head_client import JobClient
from shoal.pool.backends.local.job_server import JobServer
from shoal.pool.backends.ray_http import RayJob
from shoal.pool.endpoint import driver_arguments, driver_command
from tests.support.waiting import wait_until

TOKEN = "let-me-in"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[JobServer]:
    server = JobServer(tmp_path, TOKEN)
    yield server
    server.close()


@pytest.fixture
def client(server: JobServer) -> JobClient:
    return JobClient(server.url, TOKEN)


def ended(client: JobClient, job: str) -> RayJob:
    return wait_until(lambda: (status := client.status(job)) and status.ended and status, f"the end of {job}")


def fork_servers() -> list[psutil.Process]:
    """The fork servers that this process has started and that still run."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "shoal.jobs.driver.fork_server" in child.cmdline()]


def test_a_command_runs_once_and_its_end_and_output_are_kept(
    server: JobServer, client: JobClient, tmp_path: Path
) -> None:
    command = ["sh", "-c", 'pwd; echo "$0" >&2; read line; exit 3', "it's"]
    assert client.submit(command, "a-1", {})
    assert not client.submit(command, "a-1", {})  # it reads the end of its input at once
    assert ended(client, "a-1") == RayJob("FAILED", None, 3)
    assert client.logs("a-1") == f"{tmp_path}\nit's\n"
    assert client.submit(["true"], "a-2", {})
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
    monkeypatch.setattr("shoal.pool.backends.local.job_server._STOP_PATIENCE_S", 0.2)
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


def test_a_request_needs_the_token_and_must_be_small(server: JobServer, client: JobClient) -> None:
    with pytest.raises(JobError, match="refused the token"):
        JobClient(server.url, "guessed").submit(["true"], "a-1", {})
    with pytest.raises(JobError, match="413"):
        client.submit(["echo", "x" * 2**20], "a-1", {})
    assert client.status("a-1") is None
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.post(f"{server.url}/api/jobs/", content=b"{", headers=authorized).status_code == 400
    assert httpx.post(f"{server.url}/api/jobs/", json={}, headers=authorized).status_code == 400
    assert httpx.delete(f"{server.url}/api/jobs/a-1/logs", headers=authorized).status_code == 404


def test_only_drivers_of_the_heads_own_environment_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = driver_command(sys.executable, "job", "1")
    assert driver_arguments(mine) == ["job", "1"]
    assert driver_arguments(driver_command("/another/bin/python", "job", "1")) is None
    assert driver_arguments(["sh", "-c", "true"]) is None
    monkeypatch.setenv("SHOAL_PYTHON", "/another/bin/python")
    assert driver_arguments(mine) is None
