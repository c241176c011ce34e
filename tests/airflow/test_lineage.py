"""What a training or a prediction reads and writes, by its names in OpenLineage."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.operators.job_operator import Named, of_path, read_by, written_by
from shoal.data.dataset_spec import DatasetSpec
from shoal.jobs import JobSpec, PredictJobSpec
from shoal.jobs.results import DataResult
from tests.support.job_results import result_of

TRAINING = JobSpec.parse(
    {
        "dataset": {"paths": ["/data/flights/2013-*.parquet"], "filters": [["month", ">=", 3]]},
        "input_cols": ["x"],
        "label_col": "y",
        "eval_set": {"valid": {"sql": "SELECT x, y FROM valid", "connection": "warehouse"}},
        "register": {"model": "delays", "metric": "rmse", "holdout": {"paths": ["s3://bucket/holdout/2013.parquet"]}},
    }
)
TRAINED = result_of(model_path="/models/delays/model.ubj", model_version="7")
READ = [Named("file", "/data/flights"), Named("s3://bucket", "holdout/2013.parquet")]
WRITTEN = [Named("shoal://models", "delays", "7"), Named("file", "/models/delays/model.ubj")]


@pytest.mark.parametrize(
    ("path", "namespace", "name"),
    [
        ("/data/flights/", "file", "/data/flights"),
        ("file:///data/a%20b.parquet", "file", "/data/a b.parquet"),
        ("/data/2013-??.parquet", "file", "/data"),
        ("s3a://bucket/a/b.parquet", "s3://bucket", "a/b.parquet"),
        ("s3://bucket/year=*/*.parquet", "s3://bucket", "/"),
        ("gcs://bucket/a", "gs://bucket", "a"),
        ("abfss://box@lake.dfs.core.windows.net/a/b", "abfss://box@lake.dfs.core.windows.net", "a/b"),
        ("hdfs://namenode:8020/a", "hdfs://namenode:8020", "/a"),
    ],
)
def test_a_path_is_named_by_the_rules_of_its_storage(path, namespace, name):
    assert of_path(path) == Named(namespace, name)


def test_a_training_reads_its_files_and_writes_its_model():
    assert list(read_by(TRAINING, TRAINED)) == READ
    assert list(written_by(TRAINING, TRAINED)) == WRITTEN


def test_rows_that_were_staged_for_the_job_have_no_name():
    staged = TRAINING.with_datasets(lambda dataset: dataset.model_copy(update={"staging": "/home/staging/x"}))
    assert list(read_by(staged, TRAINED)) == []


def test_a_table_has_the_version_that_was_read():
    spec = TRAINING.model_copy(
        update={
            "dataset": DatasetSpec(format="delta", paths=("s3://lake/flights",)),
            "eval_set": {"valid": DatasetSpec(format="iceberg", paths=("/valid",), version="release-1")},
        }
    )
    read = list(read_by(spec, result_of(data=DataResult(rows=1, digest="d", version="12"))))
    assert read[:2] == [Named("s3://lake", "flights", "12"), Named("file", "/valid", "release-1")]


def test_a_prediction_reads_the_version_that_has_predicted():
    spec = PredictJobSpec.parse(
        {"model": "models:/delays@champion", "dataset": {"paths": ["/x"]}, "output_path": "/out"}
    )
    result = result_of(output_path="/out", model_uri="models:/delays/7")

    assert list(read_by(spec, result)) == [Named("file", "/x"), Named("shoal://models", "delays", "7")]
    assert list(written_by(spec, result)) == [Named("file", "/out")]


@pytest.fixture
def operator():
    with DAG("a_dag", schedule=None):
        made = DistributedTrainOperator(task_id="train", spec=TRAINING)
    made._done = TRAINING, TRAINED
    return made


def test_airflows_provider_gets_them_from_the_operator(operator):
    base = pytest.importorskip("airflow.providers.openlineage.extractors.base", reason="the provider is not installed")
    found = base.DefaultExtractor(operator).extract_on_complete(None)

    assert [(one.namespace, one.name) for one in found.inputs] == [tuple(one[:2]) for one in READ]
    assert [(one.namespace, one.name) for one in found.outputs] == [tuple(one[:2]) for one in WRITTEN]
    assert found.outputs[0].facets["version"].datasetVersion == "7"
    assert found.job_facets["sql"].query == "SELECT x, y FROM valid"
