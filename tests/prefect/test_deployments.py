"""The files of `shoal init prefect`, deployed to a real server and run by a process worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate

from shoal.prefect.janitor import AFTER_A_CRASH, automate, remove_automations
from shoal.prefect.samples import samples
from shoal.sample_files import write_samples
from tests.support import ROOT

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]  # two starts of Prefect's command and a run on 2 busy cores


def test_from_an_empty_folder_to_a_run(server, fresh_home, tmp_path: Path):
    def prefect(*arguments: str) -> str:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        environment = {**os.environ, **server, "PREFECT_WORKER_QUERY_SECONDS": "1"}
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
