"""The files of `shoal init prefect`, deployed to a real server and run by a process worker: with the commands of the
guide, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.states import Cancelling

from examples.prefect_run import _process
from shoal.jobs import list_jobs
from shoal.new_files import write_samples
from shoal.pool.api import list_pools
from shoal.prefect.janitor import AFTER_A_CRASH, automate, remove_automations
from shoal.prefect.samples import samples
from tests.support import ROOT
from tests.support.pool_processes import nothing_left
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]  # two starts of Prefect's command and a run on 2 busy cores


@pytest.fixture
def environment(server: dict[str, str], fresh_home: Path) -> Iterator[dict[str, str]]:
    """The environment of a user. The work pool is removed at the end, because all tests have the same server."""
    yield {
        **os.environ,
        **{name: value for name, value in server.items() if name.startswith("PREFECT_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    with get_client(sync_client=True) as client:
        client.request("DELETE", "/work_pools/shoal")


def test_from_an_empty_folder_to_a_run(environment, tmp_path: Path):
    def prefect(*arguments: str) -> str:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    texts = samples(tmp_path)
    assert texts.keys() == {path.name for path in (ROOT / "flows").iterdir() if path.is_file()}
    write_samples(tmp_path, texts)
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="shoal", type="process"))  # as `prefect work-pool create` does
        prefect("deploy", "--all")
        found = {each.name: each for each in client.read_deployments()}
        assert {
            "monthly",
            "on-promotion",
            "hourly",
            "every-five-minutes",
            "after-a-crash",
            "every-night",
        } <= found.keys()
        assert [one.schedule.cron for one in found["monthly"].schedules] == ["0 6 1 * *"]
        assert found["every-five-minutes"].global_concurrency_limit.limit == 1
        run = client.create_flow_run_from_deployment(found["after-a-crash"].id)
        prefect("worker", "start", "--pool", "shoal", "--run-once")
        assert client.read_flow_run(run.id).state.is_completed()

    first, second = ([one.id for one in automate()] for _ in range(2))
    assert first == second
    with get_client(sync_client=True) as client:
        expected = client.read_deployment_by_name(AFTER_A_CRASH).id
    assert Automation.read(id=first[1]).actions[0].deployment_id == expected
    remove_automations()
    remove_automations()
    with get_client(sync_client=True) as client:
        assert not {one.id for one in client.read_automations()} & set(first)


COMMANDS = re.compile(r"## Deployments and work pools\n[^#]*?\n\n((?: {4}.*\n)+)")
"""The first indented block of the chapter."""


@pytest.mark.long
@pytest.mark.ray
def test_the_commands_of_the_guide_and_the_end_of_a_run_that_is_cancelled(environment, tmp_path: Path):
    found = COMMANDS.search((ROOT / "docs" / "prefect-deployments.md").read_text())
    *before, worker, run = (line.partition("#")[0].strip() for line in found[1].splitlines())
    assert "worker start" in worker and "deployment run" in run

    def call(command: str) -> None:
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True)

    for command in before:
        call(command)
    try:
        with _process(["/bin/bash", "-c", f"cd {tmp_path}; exec {worker}"], environment, 60.0):
            call(f"{run} --param rounds=100000")  # more than it can train until it is cancelled
            [job] = wait_until(lambda: [one for one in list_jobs() if one.state == "running"], "the job to run", 120)
            with get_client(sync_client=True) as client:
                run_id = job.holder.removeprefix("prefect:").partition("/")[0]
                client.set_flow_run_state(run_id, Cancelling())
                wait_until(lambda: client.read_flow_run(run_id).state.is_cancelled(), "the run to be cancelled", 60)
            wait_until(lambda: [pool.state for pool in list_pools()] == ["down"], "the pool to be down", 60)
            assert [one.state for one in list_jobs()] == ["cancelled"]
            nothing_left()
    finally:
        remove_automations()
