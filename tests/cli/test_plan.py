"""`shoal plan`."""

import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.kinds.training.pool_plan import learned_memory
from shoal.state import Store
from shoal.state.schema import Job
from shoal.training.host import memory
from shoal.training.sizing.constants import IDLE_BYTES
from tests.cli.conftest import document


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "rows" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"a": [1.0, 2.0] * 500, "name": ["x", "y"] * 500, "y": [0, 1] * 500}), path)
    return path.parent


def test_the_memory_of_each_size_is_predicted_and_a_size_chosen(shoal, fresh_home, folder):
    result = shoal("plan", str(folder), "--pool", "local://planned?max_nodes=2", "--json")
    plan = document(result.stdout)
    assert [(size["nodes"], size["rows"], size["verdict"]) for size in plan["sizes"]] == [
        (1, 1000, "fits"),
        (2, 500, "fits"),
    ]
    assert (plan["chosen"], plan["features"], plan["node"]["is_shared"]) == (1, 1, True)
    text = shoal("plan", str(folder), "--pool", "local://planned?max_nodes=2").stdout
    assert "needs 1 node(s)" in text
    assert "more nodes add no memory" in text


@pytest.mark.parametrize("kind", ["csv", "json", "sql"])
def test_given_the_number_of_rows_only_the_first_rows_are_read(kind, shoal, tmp_path, monkeypatch):
    table = pd.DataFrame({"x": range(1000), "text": ['a "line"' + "\n" * 40] * 1000, "y": [0, 1] * 500})
    table.to_csv(tmp_path / "rows.csv", index=False)
    table.to_json(tmp_path / "rows.json", orient="records", lines=True)
    table.to_sql("rows", f"sqlite:///{tmp_path}/rows.db", index=False)
    monkeypatch.setenv("SHOAL_CONNECTION_W", f"sqlite:///{tmp_path}/rows.db")
    monkeypatch.setattr("shoal.data.row_copies._SAMPLE_BYTES", 3 * 2**10)
    dataset = {"paths": [str(tmp_path / f"rows.{kind}")], "format": kind}
    dataset = {"sql": "SELECT * FROM rows", "connection": "w"} if kind == "sql" else dataset
    fields = {"dataset": dataset, "input_cols": ["x"], "label_col": "y", "eval_set": {"same": dataset}}
    (tmp_path / "spec.json").write_text(json.dumps(fields))
    of_spec = "plan", str(tmp_path / "spec.json"), "--pool", "local://planned?max_nodes=2"
    plan = document(shoal(*of_spec, "--rows", "10001", "--json").stdout)
    assert plan["rows"] == plan["sizes"][0]["rows"] == 10_001
    assert "give a positive number" in shoal(*of_spec, "--rows", "0").stderr
    assert "give the number of rows" in shoal(*of_spec).stderr


FUNCTION = {"framework": "pytorch", "train_func": "a.b:c", "scaling_config": {"num_nodes": -1}}


def test_functions_are_planned_with_the_memory_that_is_known(shoal, some_jobs, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * 2**30)

    def plan(**fields):
        dataset = {"paths": [str(folder)], "sharded": True}
        (tmp_path / "spec.json").write_text(json.dumps({**FUNCTION, "dataset_map": {"train": dataset}, **fields}))
        of_spec = "plan", str(tmp_path / "spec.json"), "--pool", "local://planned?max_nodes=2"
        return document(shoal(*of_spec, "--json").stdout)

    first = plan()
    assert "memory of the model, and of workers of a DataLoader, is not in it" in first["reasoning"]
    assert [size["rows"] for size in first["sizes"]] == [1000, 500]
    # 8 + 64 (text) + 8 bytes a row
    assert first["sizes"][0]["terms"] == {"idle process": IDLE_BYTES["pytorch"], "shuffled rows": 80_000, "model": 0}
    given = plan(memory_per_worker="3Gi")
    assert [(size["peak_bytes"], size["verdict"]) for size in given["sizes"]] == [
        (3 * 2**30, "fits"),
        (3 * 2**30, "no"),
    ]
    with Store().transaction() as session:
        job = session.get_one(Job, ("good", 1))
        job.label, job.spec = "a.b:c", {"framework": "pytorch"}
        usages = [{"memory_usage_megabytes": 1500}, {"memory_usage_megabytes": 2500}]
        job.result = {**job.result, "peak_memory_per_worker": [2**30, 2**31], "peak_usage_per_worker": usages}
    learned = plan()
    assert (learned["sizes"][0]["peak_bytes"], learned["note"]) == (2_500 * 10**6, "")


def test_what_cannot_be_planned_is_refused_with_what_to_do(shoal, fresh_home, folder, tmp_path):
    spec = tmp_path / "spec.json"
    predict = {"framework": "predict", "dataset": {"paths": ["/x"]}, "model": "models:/x/1", "output_path": "/y"}
    gpus = {"scaling_config": {"resource_requirements_per_worker": {"num_gpus": 1}}}
    for refused in (predict, {**FUNCTION, **gpus}):
        spec.write_text(json.dumps(refused))
        assert "give the number of nodes" in shoal("plan", str(spec), "--pool", "local://planned").stderr
    uri = "ray://planned?address=http://127.0.0.1:8265"
    assert "memory_per_node" in shoal("plan", str(folder), "--pool", uri).stderr
    assert "write it as 16Gi" in shoal("plan", str(folder), "--pool", uri, "--memory-per-node", "lots").stderr
    assert "write it as 16Gi" in shoal("plan", str(folder), "--pool", uri, "--memory-per-node", "4ki").stderr


def test_the_last_five_jobs_of_a_model_scale_its_next_plan(some_jobs):
    assert learned_memory("flights", "xgboost") == (0, 1)
    with Store().transaction() as session:
        good = session.get_one(Job, ("good", 1))
        good.result = {
            **good.result,
            "model_name": "flights",
            "peak_memory_per_worker": [90, 120],
            "predicted_memory_per_worker": [100, 100],
            "idle_memory_per_worker": [20, 20],
        }
    assert learned_memory("flights", "xgboost") == (20, 1.25)
    assert learned_memory("others", "xgboost") == learned_memory("flights", "lightgbm") == (0, 1)
    for change in ({"gang": {"gpus": 1}}, {"gang": {}, "result": good.result | {"predicted_memory_per_worker": [0]}}):
        with Store().transaction() as session:
            for name, value in change.items():
                setattr(session.get_one(Job, ("good", 1)), name, value)
        assert learned_memory("flights", "xgboost") == (0, 1)
