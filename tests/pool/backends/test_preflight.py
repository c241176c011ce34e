"""What is said about the nodes of an existing Ray cluster before the first training."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import InvalidArgumentError
from shoal.pool.api import ComputePool
from shoal.pool.backends import preflight, preflight_job
from shoal.pool.backends.interface import Finding
from shoal.pool.backends.preflight import judge
from shoal.pool.backends.versions import TESTED_RAY

MINE = {"python": "3.11.7", "shoal": "0.1.0"}
LIBRARIES = {"xgboost": "3.2.0", "lightgbm": None, "torch": None, "mlflow": None, "s3fs": "2026.1", "psycopg": "3.2"}
GOOD: dict[str, Any] = {
    "host": "ray-1", "python": "3.11.2", "ray": f"{TESTED_RAY}.0", "shoal": "0.1.3", "libraries": LIBRARIES,
    "store": None, "artifacts": None, "time": 1000.0, "shm_bytes": 2**30, "disk_bytes": 2**34,
}  # fmt: skip


def findings(*, head: dict[str, Any] | None = None, worker: dict[str, Any] | None = None) -> dict[str, Finding]:
    answer = {"head": {**GOOD, **(head or {})}, "worker": {**GOOD, **(worker or {})}}
    return {each.name: each for each in judge(answer, MINE, "s3://bucket", 999.0, 1003.0)}


def test_a_cluster_that_has_everything():
    found = findings()
    assert {each.status for each in found.values()} == {"ok"}
    assert {"head: Python", "worker: artifact_location", "head: clock", "head and worker"} <= found.keys()


@pytest.mark.parametrize(
    ("name", "fact", "status", "said"),
    [
        ("Python", {"python": "3.12.1"}, "broken", "3.12.1, and this process has 3.11.7 -> use Python 3.11 there"),
        ("shoal", {"shoal": None}, "broken", "not installed -> install shoal 0.1.0 there"),
        ("shoal", {"shoal": "0.2.0"}, "broken", "0.2.0, and this process has 0.1.0 -> use shoal 0.1 there"),
        ("Ray", {"ray": "2.52.0"}, "note", f"2.52.0 -> shoal is tested with Ray {TESTED_RAY}"),
        ("libraries", {"libraries": {**LIBRARIES, "xgboost": None}}, "note", "no training library -> install those"),
        ("store", {"store": "LookupError: SHOAL_STATE_URL is not set"}, "broken", "is not set -> set SHOAL_STATE_URL"),
        ("artifact_location", {"artifacts": "OSError: refused"}, "note", "OSError: refused -> check address, rights"),
        ("clock", {"time": 900.0}, "note", "differs by 99 s -> set the clock of ray-1"),
        ("clock", {"time": 1103.0}, "note", "differs by 100 s"),
        ("/dev/shm", {"shm_bytes": 64 * 2**20}, "note", "64 MB free -> start the container with more shared memory"),
        ("disk", {"disk_bytes": 2**20}, "broken", "0.0 GB free -> free some space on ray-1"),
        ("disk", {"disk_bytes": 2**30}, "note", "1.0 GB free"),
    ],
)
def test_each_problem_is_one_line_with_its_remedy(name, fact, status, said):
    found = findings(head=fact)[f"head: {name}"]

    assert found.status == status
    assert said in str(found)
    assert "\n" not in str(found)


def test_a_worker_with_other_versions_than_the_head():
    found = findings(worker={"ray": f"{TESTED_RAY}.1", "libraries": {**LIBRARIES, "xgboost": "3.1.0"}})

    assert found["head and worker"].status == "broken"
    assert findings(worker={"libraries": {**LIBRARIES, "torch": "2.13.0"}})["head and worker"].status == "note"
    assert found["head and worker"].found == f"ray {TESTED_RAY}.0 and {TESTED_RAY}.1, xgboost 3.2.0 and 3.1.0"


def test_a_worker_needs_no_store_and_a_head_alone_is_said():
    assert "worker: store" not in findings(worker={"store": "LookupError: SHOAL_STATE_URL is not set"})
    [note] = [each for each in judge({"head": GOOD, "worker": None}, MINE, None, 1000.0, 1000.0) if each.status != "ok"]
    assert str(note) == "worker: the cluster has only its head, so no other node was checked"


def test_the_facts_of_this_machine(fresh_home, monkeypatch, tmp_path):
    order = {"pool": "lab", "artifact_location": str(tmp_path / "out"), "libraries": preflight._LIBRARIES}
    monkeypatch.delenv("SHOAL_STATE_URL", raising=False)

    here = preflight_job.facts(order)

    assert here["python"].startswith("3.")
    assert here["libraries"]["xgboost"] and here["libraries"].keys() == LIBRARIES.keys()
    assert here["store"] == 'LookupError: this node uses a store that has no pool "lab"'
    assert here["artifacts"] is None
    assert here["disk_bytes"] > 0
    (tmp_path / "file").touch()
    refused = preflight_job.facts({**order, "artifact_location": str(tmp_path / "file")})["artifacts"]
    assert refused.startswith("FileExistsError")


def test_a_pool_of_this_host_has_no_such_nodes(fresh_home):
    with pytest.raises(InvalidArgumentError, match="run `shoal doctor` on the pool's nodes"):
        ComputePool("local://mine").preflight()
