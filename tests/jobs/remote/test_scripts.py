"""A script on a Ray cluster whose nodes cannot read the folder in which it lies."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support import remote_scripts
from tests.support.remote_cluster import missing, remote_cluster

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]


def test_a_script_runs_after_its_folder_is_gone_and_again_after_a_restart() -> None:
    if why := missing():
        pytest.skip(why)
    with remote_cluster() as cluster:
        program = cluster.orchestrator.popen(
            [str(cluster.python), remote_scripts.__file__], cluster.environment, stdout=subprocess.PIPE, text=True
        )
        out, _ = program.communicate(timeout=400)
        assert program.returncode == 0
    found = json.loads(out.splitlines()[-1])
    read = [42, "rate: 1", "large", "a", [], "ran\n"]
    assert sorted(found["said"]) == [[rank, restarts, *read] for rank in (0, 1) for restarts in (0, 1)]
    assert "has at least" in found["error"] and "this node does not have the folder" in found["error"]
