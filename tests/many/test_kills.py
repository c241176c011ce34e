"""SIGKILL of a job's processes at random instants: the next attempt repeats only what has ended a moment before."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pandas as pd
import psutil
import pytest

from shoal import ComputePool, RunConfig, many
from shoal.data import DataConnector
from shoal.errors import JobFailedError
from shoal.jobs.journal import attempts
from shoal.state import Store
from shoal.state.schema import JobState
from tests.support.pool_processes import nothing_left

pytestmark = [pytest.mark.processes, pytest.mark.long]

KEYS, ROUNDS, MOST_KILLS = 400, 10, 3
REPEATED_S = 5.0
"""Seconds before a kill of which the guide says that they may be repeated."""


def called(rows: pd.DataFrame, key: int, folder: Path) -> tuple[float, float]:
    time.sleep(2.0 if key == 17 else 0.04)
    with (folder / "calls").open("a") as file:
        file.write(f"{key} {time.time()}\n")
    return float(rows.x.sum()), random.random()


def kill_later(job_id: str, dice: random.Random, kills: list[float]) -> None:
    """Kill the driver, a worker, the process of a function, or all of them, at a random instant."""
    after, whom = dice.uniform(1, 9), dice.choice(["driver", "worker", "function", "all"])

    def kill() -> None:
        time.sleep(after)
        job = attempts.latest(Store(), job_id)
        if job.state is not JobState.RUNNING or not job.driver:
            return
        with suppress(psutil.NoSuchProcess):
            driver = psutil.Process(job.driver["pid"])
            below = driver.children(recursive=True)
            chosen = {
                "driver": [driver],
                "worker": [each for each in below if each.children()][:1],
                "function": [each for each in below if not each.children()][:1],
                "all": [driver, *below],
            }
            for victim in chosen[whom]:
                with suppress(psutil.NoSuchProcess):  # it has ended with the driver
                    victim.kill()
            kills.append(time.time())

    threading.Thread(target=kill, daemon=True).start()


def run(data: object, job_id: str, folder: Path) -> dict[int, tuple[float, float]]:
    config = RunConfig(pool_name="kills", job_id=job_id, seed=3, tracking=None)
    return dict(many.run(called, data, "k", kwargs={"folder": folder}, run_config=config).values())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["frame", "file"])
def test_only_what_has_ended_a_moment_before_a_kill_is_repeated(fresh_home: Path, tmp_path: Path, kind: str) -> None:
    pool = ComputePool("local://kills?ray=false&cpus_per_node=2&max_nodes=1").up()
    frame = pd.DataFrame({"k": [row % KEYS for row in range(10 * KEYS)], "x": range(10 * KEYS)})
    frame.to_parquet(tmp_path / "rows.parquet")
    data = frame if kind == "frame" else DataConnector.from_parquet(tmp_path / "rows.parquet")
    undisturbed = run(data, "undisturbed", tmp_path)
    assert {key: value for key, (value, _) in undisturbed.items()} == frame.groupby("k").x.sum().to_dict()
    for number in range(ROUNDS):
        dice, kills, folder, found = random.Random(number), list[float](), tmp_path / str(number), None
        folder.mkdir()
        while found is None:
            if len(kills) < MOST_KILLS:
                kill_later(f"round-{number}", dice, kills)
            with suppress(JobFailedError):
                found = run(data, f"round-{number}", folder)
        assert found == undisturbed
        ended: dict[int, list[float]] = {}
        for key, at in (line.split() for line in (folder / "calls").read_text().splitlines()):
            ended.setdefault(int(key), []).append(float(at))
        for key, times in ended.items():
            for first, again in pairwise(times):
                assert any(-1 <= kill - first <= REPEATED_S and kill < again for kill in kills), (number, key)
    pool.down()
    nothing_left()
