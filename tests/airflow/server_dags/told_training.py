"""A training with any spec about which messages are sent, one for the model and one for the run: into a file."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier, Param, dag, get_current_context, task

from shoal.airflow.notifications import model_message, run_message
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

POOL = "{{ var.value.shoal_retrain_pool }}"


class ToFile(BaseNotifier):
    """Writes its message to a new file in `$AIRFLOW_HOME/told`."""

    template_fields = ("name", "text")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.name, self.text = f"{kind}-{{{{ run_id }}}}", "{{ shoal.subject }}\n{{ shoal.text }}"

    def notify(self, context: Any) -> None:
        folder = Path(os.environ["AIRFLOW_HOME"]) / "told"
        folder.mkdir(exist_ok=True)
        (folder / f".{self.name}").write_text(self.text)
        (folder / f".{self.name}").rename(folder / self.name)


@dag(
    schedule=None,
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    default_args={"owner": "tests", "retries": 0},
    params={"spec": Param({}, type="object")},
    on_success_callback=run_message(ToFile("run")),
    on_failure_callback=run_message(ToFile("run")),
    tags=["tests"],
)
def told_training() -> None:
    @task
    def specs() -> list[dict[str, Any]]:
        good = get_current_context()["params"]["spec"]
        return [good, {**good, "params": {"objective": "reg:nonsense"}}]

    said = specs()
    with pool_for_run(size=2, pool_name=POOL) as pool:
        DistributedTrainOperator.partial(
            task_id="train",
            pool_name=POOL,
            on_success_callback=model_message(ToFile("promoted")),
            on_failure_callback=model_message(ToFile("failed")),
        ).expand(spec=said)
    said >> pool.setup


told_training()
