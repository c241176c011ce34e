"""A job with partitions on a pool without Ray: after its driver was killed, it repeats nothing that has ended."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from shoal import ComputePool, RunConfig, many
from shoal.cli import app
from shoal.distributors import attach
from shoal.errors import JobFailedError
from shoal.kinds.partitions.bucket_rows import number_of_buckets
from shoal.kinds.partitions.keys import bucket_of, key_text
from shoal.os_processes import ProcessId
from shoal.state import Store
from shoal.state.schema import Job
from tests.support.pool_processes import nothing_left
from tests.support.two_node_cluster import assert_ended
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

KEYS = 60


BUCKETS: dict[int, list[int]] = defaultdict(list)
for _key in range(KEYS):
    BUCKETS[bucket_of(key_text(_key), number_of_buckets(KEYS))].append(_key)
BLOCKED = max(max(BUCKETS.values(), key=len), key=key_text)
"""A key that is the last one in its bucket, after some others."""


def train(rows: pd.DataFrame, key: int, folder: Path) -> int:
    with (folder / "calls").open("a") as file:
        file.write(f"{key} {os.getpid()} {os.getppid()}\n")
    while key == BLOCKED and not (folder / "go").exists():
        time.sleep(0.05)
    return key * len(rows)


def calls(folder: Path) -> list[list[int]]:
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(part) for part in line.split()] for line in lines]


@pytest.mark.timeout(300)
def test_the_next_attempt_continues_where_a_killed_driver_was(fresh_home: Path, tmp_path: Path) -> None:
    pool = ComputePool("local://small?max_nodes=1&cpus_per_node=2&ray=false").up()
    table = tmp_path / "rows.parquet"
    data = pd.DataFrame({"store": list(range(KEYS)) * 2})
    data.to_parquet(table)
    config = RunConfig(pool_name="small", job_id="nightly")

    call = many.submit_run(train, data, "store", kwargs={"folder": tmp_path}, run_config=config)
    # One worker has the bucket of the blocked key, and the other processes all other buckets.
    results = Path(fresh_home, "jobs", "nightly", "1", "partitions", "results")
    wait_until(lambda: len([*results.glob("bucket-*")]) == len(BUCKETS) - 1, "all other buckets", 120)
    wait_until(lambda: [*results.glob("kept-*")], "the outcomes of the blocked key's bucket", 120)
    with Store().reading() as session:
        driver = ProcessId.from_json(session.get_one(Job, ("nightly", 1)).driver)
    driver.signal(signal.SIGKILL)
    assert_ended({pid for _, *pids in calls(tmp_path) for pid in pids})
    with pytest.raises(JobFailedError, match="was killed"):
        call.result()

    (tmp_path / "go").touch()
    found = many.run(train, data, "store", kwargs={"folder": tmp_path}, run_config=config)
    assert {each.key: each.value for each in found} == {key: key * 2 for key in range(KEYS)}
    assert Counter(key for key, *_ in calls(tmp_path)) == {key: 1 + (key == BLOCKED) for key in range(KEYS)}
    status = attach("nightly").status()
    assert (status.attempt, status.result.partitions) == (2, {"succeeded": KEYS, "failed": 0})
    assert str(status.progress) == f"row {KEYS * 2} of {KEYS * 2}, succeeded: {KEYS}, failed: 0"
    assert not list(Path(fresh_home, "jobs", "nightly").glob("*/partitions/rows"))

    spec = {
        "framework": "partitions",
        "function": "builtins:len",
        "by": "store",
        "dataset": {"paths": [str(table)]},
        "run_config": {"pool_name": "small"},
    }
    del spec["framework"]
    spec["run_config"]["job_id"] = "from-a-file"
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    told = CliRunner().invoke(app, ["many", "run", str(tmp_path / "spec.json")])
    assert told.exit_code == 1
    assert "the function has failed for all 60 partitions" in told.output
    listed = json.loads(CliRunner().invoke(app, ["many", "list", "from-a-file", "--json"]).stdout)
    assert listed["counts"] == {"succeeded": 0, "failed": 60}
    assert listed["partitions"][0]["error"].startswith("TypeError")
    listed = CliRunner().invoke(app, ["many", "list", "nightly", "--state", "succeeded", "--limit", "3"]).stdout
    assert len([line for line in listed.splitlines() if " succeeded " in line and " s " in line]) == 3
    assert "60 partitions succeeded, 0 failed" in listed
    shown = json.loads(CliRunner().invoke(app, ["many", "show", "nightly", str(BLOCKED), "--json"]).stdout)
    assert (shown["key"], shown["status"], shown["attempts"], shown["log"]) == (str(BLOCKED), "succeeded", 1, "")
    assert "has no partition 99" in CliRunner().invoke(app, ["many", "show", "nightly", "99"]).output
    pool.down()
    nothing_left()
