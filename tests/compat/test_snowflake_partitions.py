"""Snowflake's names for functions and models per partition: examples of Snowflake's guides, with changed imports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from shoal import ComputePool
from shoal.compat.snowflake import (
    DPF,
    DPFRun,
    ExecutionOptions,
    ManyModelInference,
    ManyModelTraining,
    ModelSerde,
    PartitionStatus,
    RunStatus,
)
from shoal.compat.snowflake_partitions import stage_root
from shoal.errors import InvalidArgumentError
from tests.support.homes import new_home

pytestmark = pytest.mark.processes

REGIONS = ["North", "South", "East", "West"]


@pytest.fixture(scope="module")
def pool() -> Iterator[None]:
    with new_home():
        found = ComputePool("local://small?max_nodes=1&cpus_per_node=2&ray=false").up()
        yield
        found.down()


@pytest.fixture(scope="module")
def sales() -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"amount": random.random(200), "feature1": random.random(200)})
    return frame.assign(region=random.choice(REGIONS, 200), target=3 * frame["feature1"])


def process_sales_data(data_connector: Any, context: Any) -> None:
    df = data_connector.to_pandas()
    print(f"Processing {len(df)} records for region: {context.partition_id}")
    if context.partition_id == "West":
        raise ValueError("no sales")
    if context.partition_id == "South":
        os._exit(3)
    summary = {"region": context.partition_id, "total_sales": df["amount"].sum(), "record_count": len(df)}
    context.upload_to_stage(
        summary, "sales_summary.json", write_function=lambda obj, path: Path(path).write_text(json.dumps(obj))
    )
    context.upload_to_stage(summary, "summary.pkl")
    assert context.download_from_stage("summary.pkl") == summary
    batches = list(data_connector.to_torch_dataset(batch_size=2, columns=["amount"]))
    assert batches[0]["amount"].shape == (2, 1)


def test_a_function_for_each_partition(pool: None, sales: pd.DataFrame) -> None:
    dpf = DPF(process_sales_data, "analytics_stage")
    run = dpf.run(
        partition_by="region",
        snowpark_dataframe=sales,
        run_id="regional_analytics_2024",
        execution_options=ExecutionOptions(num_cpus_per_worker=1),
    )

    assert run.wait() == RunStatus.PARTIAL_FAILURE == run.status
    progress = {status: [each.partition_id for each in ended] for status, ended in run.get_progress().items()}
    assert progress == {"DONE": ["East", "North"], "INTERNAL_ERROR": ["South"], "FAILED": ["West"]}
    assert run.get_progress()["FAILED"][0].logs.endswith("ValueError: no sales")
    details = run.partition_details
    assert details["East"].status == PartitionStatus.DONE
    assert details["East"].logs.startswith("Processing ")
    manager = details["North"].stage_artifacts_manager
    assert manager.list() == ["sales_summary.json", "summary.pkl"]
    summary = manager.get("sales_summary.json", read_function=lambda path: json.loads(Path(path).read_text()))
    expected = sales[sales["region"] == "North"]
    assert summary == {
        "region": "North",
        "total_sales": expected["amount"].sum(),
        "record_count": len(expected),
    }

    restored = DPFRun.restore_from(run_id="regional_analytics_2024", stage_name="analytics_stage")
    assert {key: each.status for key, each in restored.partition_details.items()} == {
        key: each.status for key, each in details.items()
    }
    for refused in (restored.wait, restored.cancel):
        with pytest.raises(InvalidArgumentError, match="is not possible for a restored run"):
            refused()
    with pytest.raises(InvalidArgumentError, match='the run "regional_analytics_2024" exists'):
        dpf.run("region", sales, "regional_analytics_2024")
    with pytest.raises(InvalidArgumentError, match="has no run other"):
        DPFRun.restore_from("other", "analytics_stage")


class JsonSerde(ModelSerde):
    filename = "model.json"

    def write(self, model: Any, file_path: str) -> None:
        Path(file_path).write_text(json.dumps(model))

    def read(self, file_path: str) -> Any:
        return json.loads(Path(file_path).read_text())


def test_a_model_for_each_partition(pool: None, sales: pd.DataFrame, tmp_path: Path) -> None:
    def train(data_connector: Any, context: Any) -> Any:
        from sklearn.linear_model import LinearRegression

        df = data_connector.to_pandas()
        if context.partition_id == "East":
            return None
        return LinearRegression().fit(df[["feature1"]], df["target"])

    trainer = ManyModelTraining(train, str(tmp_path / "models"))
    training_run = trainer.run(partition_by="region", snowpark_dataframe=sales, run_id="regional_models_v1")
    assert training_run.wait(show_progress=False) == RunStatus.SUCCESS
    assert training_run.get_model("North").coef_ == pytest.approx([3.0])
    restored = ManyModelTraining.restore_from("regional_models_v1", str(tmp_path / "models"))
    assert restored.get_model("South").coef_ == pytest.approx([3.0])
    with pytest.raises(FileNotFoundError):
        restored.get_model("East")

    def predict(data_connector: Any, model: Any, context: Any) -> None:
        rows = data_connector.to_pandas()
        context.upload_to_stage(model.predict(rows[["feature1"]]) - rows["target"], "errors.pkl")

    inference = ManyModelInference(predict, str(tmp_path / "models"), training_run_id="regional_models_v1")
    inference_run = inference.run(partition_by="region", snowpark_dataframe=sales, run_id="predictions")
    assert inference_run.wait() == RunStatus.PARTIAL_FAILURE
    assert [each.partition_id for each in inference_run.get_progress()["FAILED"]] == ["East"]
    errors = inference_run.partition_details["West"].stage_artifacts_manager.get("errors.pkl")
    assert len(errors) == (sales["region"] == "West").sum()
    assert errors.abs().max() == pytest.approx(0)

    other = ManyModelTraining(
        lambda connector, context: len(connector.to_pandas()), str(tmp_path / "models"), JsonSerde()
    )
    run = other.run("region", sales, "regional_models_v1", on_existing_artifacts="overwrite")
    assert run.wait() == RunStatus.SUCCESS
    assert run.get_model("West") == (sales["region"] == "West").sum()
    assert (tmp_path / "models" / "regional_models_v1" / "West" / "model.json").exists()


def test_a_partition_for_each_file(pool: None, sales: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    sales.head(5).to_parquet(tmp_path / "in" / "a.parquet")
    sales.head(7).to_parquet(tmp_path / "in" / "deep" / "b.parquet")
    (tmp_path / "in" / "c.txt").touch()

    def process_file(data_connector: Any, context: Any) -> None:
        context.upload_to_stage(len(data_connector.to_pandas()), "rows.pkl")

    dpf = DPF(process_file, str(tmp_path / "out"))
    run = dpf.run_from_stage(stage_location=f"{tmp_path}/in/", run_id="files")
    assert run.wait() == RunStatus.SUCCESS
    rows = {key: each.stage_artifacts_manager.get("rows.pkl") for key, each in run.partition_details.items()}
    assert rows == {"a.parquet": 5, "deep/b.parquet": 7}
    with pytest.raises(InvalidArgumentError, match="has no file that matches"):
        dpf.run_from_stage(f"{tmp_path}/in/", "none", file_pattern="*.csv")


def test_what_is_not_possible_here_is_refused(fresh_home: Path) -> None:
    for options in ({"num_gpus_per_worker": 1}, {"max_retries": 3}, {"fail_fast": True}):
        with pytest.raises(InvalidArgumentError, match="is not possible here"):
            ExecutionOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="is no name of an artifact"):
        DPF(print, "stage").run("region", pd.DataFrame({"region": [1]}), "../other")
    assert stage_root("@db.schema.stage/run/part") == str(fresh_home / "stages" / "db.schema.stage" / "run" / "part")
    assert stage_root("/a/b/") == "/a/b"
    assert stage_root("s3://bucket/stage") == "s3://bucket/stage"
