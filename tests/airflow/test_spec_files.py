"""A spec in a JSON or YAML file beside the DAG."""

from __future__ import annotations

import json

import pytest
from airflow.sdk import DAG

from shoal.airflow.operators import DistributedTrainOperator
from shoal.errors import InvalidArgumentError

SPEC = {"dataset": {"paths": ["/data/{{ ds }}"]}, "input_cols": ["x"], "label_col": "y"}
YAML = 'dataset:\n  paths: ["/data/{{ ds }}"]\ninput_cols: [x]\nlabel_col: y\n'


def loaded(folder, spec):
    """The task, as Airflow has it when it has loaded the DAG."""
    with DAG("a_dag", schedule=None, template_searchpath=[str(folder)]) as dag:
        task = DistributedTrainOperator(task_id="train", spec=spec)
    dag.resolve_template_files()
    return task


@pytest.mark.parametrize(("name", "text"), [("job.json", json.dumps(SPEC)), ("job.yaml", YAML), ("job.yml", YAML)])
def test_a_file_is_read_when_the_dag_is_loaded_and_rendered_in_the_task(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    for given in (name, str(tmp_path / name)):
        task = loaded(tmp_path, given)
        assert task.spec == SPEC
        task.render_template_fields({"ds": "2026-01-01"})
        assert task.spec["dataset"]["paths"] == ["/data/2026-01-01"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.json", json.dumps({**SPEC, "input_colss": ["x"]}), "task train: .*did you mean input_cols"),
        ("job.json", "{", r'the spec "job.json" is not valid JSON'),
        ("job.yaml", "a: [", r'the spec "job.yaml" is not valid YAML'),
        ("job.yaml", "- a", r'the spec "job.yaml" is not a YAML object'),
        ("job.json", json.dumps({**SPEC, "dataset": {"paths": ["data/x"]}}), "relative path"),
        ("other.json", "{}", r"spec='job.json' cannot be read: .*looked up in the DAG file's folder"),
    ],
)
def test_a_wrong_file_is_refused_when_the_dag_is_loaded(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgumentError, match=said):
        loaded(tmp_path, "job.json" if name == "other.json" else name)


def test_a_name_that_is_a_template_is_read_in_the_task(tmp_path, context):
    (tmp_path / "job.json").write_text(json.dumps(SPEC))
    task = loaded(tmp_path, "{{ dag_run.run_id }}.json")
    task.render_template_fields({"dag_run": type("Run", (), {"run_id": "job"})})
    assert task.job_spec({**context, "ds": "2026-01-02"}).dataset.paths == ("/data/2026-01-02",)
