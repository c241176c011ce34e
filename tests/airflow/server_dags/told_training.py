"""Jobs of each kind and an own task in one run, about which messages are sent, into files: one per task and one of the
run. The tasks that fail succeed when the file `late.parquet` exists."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier, Param, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowSkipException

from shoal.airflow.notifications import model_message, run_message
from shoal.airflow.operators import (
    BatchPredictOperator,
    DistributedTrainOperator,
    ManyModelsOperator,
    TuneOperator,
)
from shoal.airflow.pool_for_run import pool_for_run

POOL = "{{ var.value.shoal_retrain_pool }}"
DATA, LATE = ({"paths": [f"{{{{ params.folder }}}}/{name}.parquet"]} for name in ("data", "late"))
ROWS, LATE_ROWS = (
    {"paths": ["{{ params.spec.dataset.paths[0] }}"]},
    {"paths": ["{{ params.folder }}/late_rows.parquet"]},
)
SMALL = {"input_cols": ["x"], "label_col": "y", "n_estimators": 2}


class ToFile(BaseNotifier):
    """Writes its message to a file in `$AIRFLOW_HOME/told`."""

    template_fields = ("name", "text")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.text = f"{name}-{{{{ run_id }}}}", "{{ shoal.subject }}\n{{ shoal.text }}"

    def notify(self, context: Any) -> None:
        folder = Path(os.environ["AIRFLOW_HOME"]) / "told"
        folder.mkdir(exist_ok=True)
        (folder / f".{self.name}").write_text(self.text)
        (folder / f".{self.name}").rename(folder / self.name)


of_task = model_message(ToFile("{{ ti.task_id }}"))
of_run = run_message(ToFile("run"))


def fail_until_healed(*_: Any) -> None:
    if not Path(get_current_context()["params"]["folder"], "late.parquet").exists():
        raise RuntimeError("the disk is full")


def mean(rows: Any, key: int, folder: str) -> float:
    if key == 3 and not os.path.exists(f"{folder}/late.parquet"):
        raise ValueError(f"no sales of store {key}")
    return float(rows["y"].mean())


def train(data: Any, **kwargs: Any) -> DistributedTrainOperator:
    return DistributedTrainOperator(spec={**SMALL, "dataset": data}, pool_name=POOL, **kwargs)


def tune(data: Any, **kwargs: Any) -> TuneOperator:
    space = {"max_depth": {"type": "int", "low": 2, "high": 3}}
    return TuneOperator(space=space, train={**SMALL, "dataset": data}, trials=2, pool_name=POOL, **kwargs)


def many(data: Any, max_failed: int = 1, **kwargs: Any) -> ManyModelsOperator:
    of = {"function": mean, "function_kwargs": {"folder": "{{ params.folder }}"}, "max_failed": max_failed}
    return ManyModelsOperator(dataset=data, by="store", pool_name=POOL, **of, **kwargs)


def predict(data: Any, **kwargs: Any) -> BatchPredictOperator:
    data = ROWS if data is DATA else LATE_ROWS
    path = "{{ params.folder }}/{{ ti.task_id }}-{{ run_id }}"
    model = "models:/{{ params.spec.register.model }}@champion"
    return BatchPredictOperator(model=model, dataset=data, output_path=path, pool_name=POOL, **kwargs)


@dag(
    schedule=None,
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    default_args={
        "owner": "tests",
        "retries": 0,
        "on_success_callback": of_task,
        "on_failure_callback": of_task,
        "on_skipped_callback": of_task,
    },
    max_active_tasks=3,
    params={"spec": Param({}, type="object"), "folder": ""},
    on_success_callback=of_run,
    on_failure_callback=of_run,
    render_template_as_native_obj=True,
    tags=["tests"],
)
def told_training() -> None:
    @task
    def own() -> None:
        fail_until_healed()

    @task
    def not_run() -> None: ...

    @task
    def nothing_new() -> None:
        raise AirflowSkipException("no new files")

    own() >> not_run()
    nothing = nothing_new()
    with pool_for_run(size=2, pool_name=POOL):
        first = DistributedTrainOperator(task_id="train", spec="{{ params.spec }}", pool_name=POOL)
        for kind in (train, tune, many, predict):
            name = kind.__name__
            done = kind(DATA, task_id=f"{name}_done")
            failed = kind(LATE, task_id=f"{name}_failed")
            after = kind(DATA, task_id=f"{name}_after", post_execute=fail_until_healed)
            skipped = kind(DATA, task_id=f"{name}_skipped")
            first >> [done, failed, after]
            nothing >> skipped
        first >> many(DATA, 0, task_id="many_strict")


told_training()
