"""Functions per partition in the Ray cluster to which this process is connected: Ray's workers fork the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from shoal import RunConfig, many
from shoal.errors import InvalidArgumentError
from tests.support.two_node_cluster import TwoNodes, connected

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def driver(two_nodes: TwoNodes) -> Iterator[TwoNodes]:
    with connected(two_nodes):
        yield two_nodes


def test_partitions_are_processed_on_all_nodes_and_a_crash_costs_one(driver: TwoNodes, tmp_path: Path) -> None:
    frame = pd.DataFrame({"store": np.repeat(np.arange(40), 5), "x": np.arange(200.0)})

    def train(rows: pd.DataFrame, key: int) -> tuple[float, int]:
        if key == 3:
            os.abort()
        return float(rows["x"].sum()), os.getppid()

    config = RunConfig(artifact_location=str(tmp_path), job_id="on-ray")
    results = many.run(train, frame, "store", run_config=config)

    sums = frame.groupby("store")["x"].sum()
    assert {key: value for key, (value, _) in results.values()} == {key: sums[key] for key in range(40) if key != 3}
    assert results[3].error == "the process of the function was killed by SIGABRT in 2 attempts"
    assert len({worker for _, (_, worker) in results.values()}) == 2
    with pytest.raises(InvalidArgumentError, match="submit needs a job on a pool"):
        many.submit_run(train, frame, "store")
