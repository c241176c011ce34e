"""Snowflake's names: the behaviours that snowflake-ml-python's own tests of its connector and of its jobs check."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from shoal import ComputePool
from shoal.compat import snowflake
from shoal.compat.snowflake import (
    DataConnector,
    MLJob,
    PyTorchDistributor,
    PyTorchScalingConfig,
    ShardedDataConnector,
    remote,
)
from shoal.data import ShardedDataConnector as OwnConnector
from shoal.data.planning import ALONE, GangPosition, set_current_position
from shoal.errors import InvalidArgumentError, JobFailedError
from shoal.state.schema import JobState
from shoal.training.cluster import Node
from shoal.training.pytorch.request import lay_out

ROWS = pa.table(
    {
        "col1": pa.array([[i, i * 10] for i in range(7)], pa.list_(pa.int64(), 2)),
        "col2": [10.0, 11.0, 12.0, 13.0, 14.0, None, 16.0],
        "col3": ["a", "ab", "abc", "m", "mn", "mnm", "mnmn"],
    }
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{number}.parquet") for number in range(2)]
    pq.write_table(ROWS.slice(0, 4), paths[0])
    pq.write_table(ROWS.slice(4), paths[1])
    return paths


@pytest.fixture
def connector(files: list[str]) -> DataConnector:
    return DataConnector.from_sources(None, files)


def test_batches_are_whole_and_numbers_have_two_dimensions(connector: DataConnector) -> None:
    dataset = connector.to_torch_dataset(batch_size=2)
    for _ in range(2):  # a second epoch gives the same
        batches = list(DataLoader(dataset, batch_size=None))
        assert [batch["col3"] for batch in batches] == [["a", "ab"], ["abc", "m"], ["mn", "mnm"]]
        assert [batch["col2"].shape for batch in batches] == [(2, 1)] * 3
        np.testing.assert_array_equal(batches[2]["col2"], [[14.0], [np.nan]])
    assert len(list(connector.to_torch_dataset(batch_size=2, drop_last_batch=False))) == 4


def test_a_row_has_arrays_of_one_number(connector: DataConnector) -> None:
    rows = list(connector.to_torch_dataset())
    assert [row["col2"].shape for row in rows] == [(1,)] * 7 and rows[0]["col3"] == "a"
    (first, _) = DataLoader(connector.to_torch_dataset(), batch_size=3, drop_last=True)
    torch.testing.assert_close(first["col2"], torch.tensor([[10.0], [11.0], [12.0]], dtype=torch.float64))


@pytest.mark.parametrize(("native", "loader"), [(1, 2), (2, None), (None, 2), (None, 7), (7, None)])
def test_shapes_of_lists_and_numbers(connector: DataConnector, native: int | None, loader: int | None) -> None:
    dataset = connector.to_torch_dataset(batch_size=native)
    batch = next(iter(DataLoader(dataset, batch_size=loader)))
    sizes = tuple(size for size in (loader, native) if size is not None)
    assert (batch["col1"].shape, batch["col2"].shape) == ((*sizes, 2), (*sizes, 1))


def test_the_shapes_travel_with_the_dataset_and_can_be_refused(fresh_home: Path) -> None:
    connector = ShardedDataConnector.from_dataframe(ROWS.to_pandas(), equal=True)
    (part,) = connector.random_split([1.0])
    in_worker = OwnConnector.from_spec(part.to_spec().model_dump())
    assert isinstance(in_worker, OwnConnector)
    try:
        shapes = []
        for rank in range(2):
            set_current_position(GangPosition(rank, 2, 0))
            shapes += [batch["col2"].shape for batch in in_worker.get_shard().to_torch_dataset(batch_size=2)]
    finally:
        set_current_position(ALONE)
    assert shapes == [(2, 1)] * 4  # 4 rows for each rank: one of the 7 is repeated
    flat = DataConnector.from_dataframe(ROWS.to_pandas(), expand_dims=False)
    assert next(iter(flat.to_torch_dataset(batch_size=2)))["col2"].shape == (2,)


def test_one_query_or_several_paths_are_a_source(files: list[str]) -> None:
    session = SimpleNamespace(sql=lambda text: ROWS if text == "SELECT 1" else None)
    query = SimpleNamespace(sql="SELECT 1", query_id=None)  # Snowflake's DataFrameInfo
    assert DataConnector.from_sources(session, [query]).num_rows() == 7
    assert DataConnector.from_sources(session, files).data_sources == files
    with pytest.raises(InvalidArgumentError, match="contains a query and 1 more"):
        DataConnector.from_sources(session, [query, files[0]])


def test_a_job_has_snowflakes_words(capsys: pytest.CaptureFixture[str]) -> None:
    class Call:
        job_id, state = "pytorch-1", JobState.RUNNING

        def __init__(self) -> None:
            self.job = self

        def status(self) -> Any:
            return SimpleNamespace(state=self.state)

        def wait(self, timeout: float | None) -> None:
            assert timeout is None
            self.state = JobState.FAILED
            raise JobFailedError("it failed")

        def logs(self) -> Any:
            return iter(["one", "two", "three"])

    job: MLJob[None] = MLJob(Call())  # type: ignore[arg-type]
    assert (job.id, job.name, job.status, job.wait(), job.status) == ("pytorch-1",) * 2 + ("RUNNING", *["FAILED"] * 2)
    job.show_logs(limit=2)
    assert capsys.readouterr().out == "two\nthree\n"
    assert job.get_logs(as_list=True) == ["one", "two", "three"] and job.get_logs(0) == ""


def test_arguments_that_nothing_stands_for_are_refused() -> None:
    remote("pool", stage_name="stage", external_access_integrations=["x"], session=None)
    with pytest.raises(InvalidArgumentError, match="@remote has no argument enable_metrics here"):
        remote("pool", stage_name="stage", enable_metrics=True)


def test_the_context_knows_the_backends() -> None:
    context = snowflake.get_context()
    assert "gloo" in context.get_supported_backends()
    assert context.get_default_backend() in context.get_supported_backends()


def test_the_context_says_what_stands_for_the_artifact_manager() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no artifact manager here: .* get_model_dir\(\), .*checkpoint"):
        snowflake.get_context().get_artifact_manager()


@pytest.mark.ray
def test_a_folder_is_submitted_with_its_script(
    real_pool: ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "conf.yaml").write_text("rate: 1")
    (project / "train.py").write_text(
        "import os, ray, sys\nprint('said', open(sys.argv[1]).read(), os.environ['COLOUR'], ray.is_initialized())\n"
        "assert not {'RANK', 'WORLD_SIZE', 'TORCHELASTIC_RUN_ID'} & {*os.environ}"  # libraries would wait for peers
    )
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"stage_name": "stage", "env_vars": {"COLOUR": "red"}}
    directory = snowflake.submit_directory("project", "TESTS", entrypoint="train.py", args=["conf.yaml"], **given)
    file = snowflake.submit_file("project/train.py", "tests", args=["project/conf.yaml"], **given)
    for job in (directory, file):
        assert (job.wait(), job.result()) == ("DONE", None), job.get_logs()
        assert "said rate: 1 red True" in job.get_logs()


@pytest.mark.ray
def test_a_function_for_each_partition_runs_in_a_remote_function(real_pool: ComputePool) -> None:
    table = pd.DataFrame({"region": ["East", "West", "East"], "amount": [1.0, 2.0, 3.0]})

    def total(data_connector: Any, context: Any) -> None:
        assert context.partition_id == "East", "no sales"
        context.upload_to_stage(float(data_connector.to_pandas()["amount"].sum()), "total")

    @snowflake.remote("TESTS")
    def launch() -> list[str]:
        run = snowflake.DPF(total, "stage").run("region", table, "run", execution_options=snowflake.ExecutionOptions())
        return [run.wait().value, run.status.value, *run.get_progress()]

    job = launch()
    assert job.result() == ["PARTIAL_FAILURE", "PARTIAL_FAILURE", "DONE", "FAILED"], job.get_logs()
    run = snowflake.DPFRun.restore_from("run", "stage")
    assert run.partition_details["East"].stage_artifacts_manager.get("total") == 4.0
    assert "no sales" in run.partition_details["West"].logs


def test_an_entrypoint_is_a_script_in_the_folder(tmp_path: Path) -> None:
    for entrypoint in ("src/train.py", ["python", "train.py"]):
        with pytest.raises(InvalidArgumentError, match="entrypoint must be the name of a script in"):
            snowflake.submit_directory(tmp_path, "pool", entrypoint=entrypoint)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="submit_file has no argument spec_overrides here"):
        snowflake.submit_file(tmp_path / "train.py", "pool", spec_overrides={})


def test_a_distributor_without_a_scaling_config_takes_the_whole_pool() -> None:
    omitted = PyTorchDistributor(print).scaling_config
    cpus = [Node(name="a", cpus=4, gpus=0), Node(name="b", cpus=4, gpus=0)]
    gpus = [Node(name="a", cpus=8, gpus=4), Node(name="b", cpus=8, gpus=4)]
    layouts = [lay_out(omitted, nodes) for nodes in (cpus, gpus)]
    assert [(layout.num_workers, layout.gpus_per_worker) for layout in layouts] == [(2, 0), (8, 1)]
    given = PyTorchScalingConfig(num_nodes=2)
    assert PyTorchDistributor(print, given).scaling_config == given
