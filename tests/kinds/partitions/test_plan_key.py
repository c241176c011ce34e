"""Which later run of a job continues the partitions of an earlier one: the key of the plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest

from shoal import RunConfig
from shoal.data import DataConnector
from shoal.data.parquet.files import DataFile, list_files
from shoal.jobs.submission import fingerprint
from shoal.kinds.partitions.call import program_of
from shoal.kinds.partitions.engine import plan_key
from shoal.kinds.partitions.partition_messages import PartitionProgram
from shoal.kinds.partitions.spec import PartitionsJobSpec, PartitionsScalingConfig

FRAME = pd.DataFrame({"store": np.arange(10), "sales": 1.0})


def adding(more: float) -> Callable[..., float]:
    return lambda rows, key, factor=1: rows.sales.sum() * factor + more


def key_of(dataset: Any, function: Callable[..., Any] | None = None, **fields: Any) -> str:
    given = {"dataset": dataset, "by": "store", "run_config": RunConfig(seed=3), "program": "stored", **fields}
    return plan_key(PartitionsJobSpec.parse(given), program_of(function or adding(0)))


@pytest.fixture
def files(fresh_home: Path, tmp_path: Path) -> DataConnector:
    FRAME.to_parquet(tmp_path / "rows.parquet")
    return DataConnector.from_parquet(tmp_path / "rows.parquet")


def test_a_frame_that_is_staged_again_is_recognised_by_its_rows(fresh_home: Path) -> None:
    def key(frame: pd.DataFrame) -> str:
        connector = DataConnector.from_dataframe(frame)
        try:
            return key_of(connector)
        finally:
            connector.discard_staging()

    assert key(FRAME) == key(FRAME.copy())
    changed = (FRAME.assign(sales=2.0), FRAME.iloc[::-1], FRAME.assign(store=FRAME.store.astype("int8")))
    assert len({key(frame) for frame in (FRAME, *changed)}) == 4


def test_a_job_that_is_judged_otherwise_is_the_same_job(files: DataConnector) -> None:
    spec = PartitionsJobSpec.parse({"dataset": files, "by": "store", "program": "stored"})
    assert fingerprint(spec) == fingerprint(spec.model_copy(update={"max_failed": 0.1}))


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_file_counts_as_changed_when_it_was_written_again(
    files: DataConnector, monkeypatch: pytest.MonkeyPatch, is_equal: bool
) -> None:
    first = key_of(files)
    if not is_equal:
        path = Path(files.source.paths[0])
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert (key_of(files) == first) is is_equal
    without_times = [DataFile(file.path, file.size) for file in list_files(files.source.paths)]
    monkeypatch.setattr("shoal.data.dataset_spec.list_files", lambda paths: without_times)
    assert key_of(files) != key_of(files), "a change could remain unnoticed"


def test_all_that_determines_the_outcomes_is_part_of_the_key(files: DataConnector) -> None:
    config = {"seed": 3}
    keys = [
        key_of(files),
        key_of(files, adding(1)),
        key_of(files, partial(adding(1), factor=2)),
        key_of(files, by=["store", "sales"]),
        key_of(files, columns=["sales"]),
        key_of(files, partition_timeout=5),
        key_of(files, scaling_config={"num_cpu_per_worker": 2}),
        key_of(files, run_config={"seed": 4}),
        key_of(files, run_config={**config, "env": {"PRICES": "new"}}),
        key_of(files, run_config={**config, "packages": ["einops==0.8"]}),
        key_of(files, run_config={**config, "code": ["/home/_code/0123"]}),
        key_of(DataConnector.from_parquet(files.source.paths, filters=[("sales", ">", 0)])),
        key_of(files.random_split([0.5, 0.5], seed=1)[0]),
    ]
    assert len({*keys}) == len(keys)
    more = PartitionsScalingConfig(num_workers=3)
    other = {**config, "max_restarts": 5, "timeout": 60, "priority": 1, "pool_name": "other"}
    assert key_of(files, scaling_config=more, run_config=other) == keys[0]


SCRIPT = """
import sys, cloudpickle, pandas
from shoal.kinds.partitions.call import program_of

class Model:
    names = {"sales", "store", "a", "b", "c"}

def train(rows, key, *, options):
    return Model() if "sales" in {"sales", "store", "a", "b", "c"} else options

from functools import partial
sys.stdout.buffer.write(cloudpickle.dumps(program_of(partial(train, options={"x", "y", "z"}))))
"""


@pytest.mark.processes
def test_the_function_of_a_script_is_recognised_in_another_process(tmp_path: Path) -> None:
    programs: list[PartitionProgram] = []
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        (tmp_path / seed / "script.py").write_text(SCRIPT)
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(tmp_path / seed / "script.py")]
        programs.append(cloudpickle.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout))
    assert programs[0].content != programs[1].content
    assert programs[0].digest == programs[1].digest
