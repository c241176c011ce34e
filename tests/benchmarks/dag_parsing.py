"""What does a DAG file with shoal's operators cost Airflow's DAG processor, compared with standard operators?

Each turn is a new process that executes one DAG file, as the DAG processor does. `airflow.sdk` is imported before the
clock starts. The times are CPU times, so that other work on the machine does not count.

Run it with ``python -m tests.benchmarks.dag_parsing``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.benchmarks.report import table

HEAD = """
from datetime import UTC, datetime, timedelta
from airflow.sdk import dag, task
"""
STANDARD = """
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import PythonOperator, ShortCircuitOperator
from airflow.providers.standard.sensors.python import PythonSensor

@dag(schedule=None, start_date=datetime(2013, 1, 1, tzinfo=UTC))
def parsed():
    @task
    def spec():
        return {}

    spec() >> PythonSensor(task_id="nodes", python_callable=print) >> BashOperator(task_id="train", bash_command="true")
    ShortCircuitOperator(task_id="check", python_callable=print) >> PythonOperator(task_id="p", python_callable=print)
    EmptyOperator(task_id="end")

parsed()
"""
OURS = """
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.operators import (
    BatchPredictOperator, CheckModelsOperator, CleanupPoolOperator, DistributedTrainOperator, LeasePoolOperator,
    ScaleClusterOperator, SweepPoolsOperator,
)
from shoal.airflow.sensors import NodesSensor

POOL = "local://retrain?max_nodes=4"

@dag(schedule=None, start_date=datetime(2013, 1, 1, tzinfo=UTC))
def parsed():
    @task
    def spec():
        return {}

    @task.distributed(num_workers=2, pool_name=POOL)
    def rank():
        return 0

    with pool_for_run(size=3, pool_name=POOL):
        NodesSensor(task_id="nodes", expected_nodes=3, pool_name=POOL) >> DistributedTrainOperator(
            task_id="train", pool_name=POOL,
            spec={"dataset": {"paths": ["/data"]}, "input_cols": ["x"], "label_col": "y"},
        ) >> rank()
        DistributedTrainOperator(task_id="templated", pool_name=POOL, spec=spec())
        BatchPredictOperator(
            task_id="predict", pool_name=POOL, model="models:/m@champion", dataset={"paths": ["/data"]},
            output_path="/out",
        )
    LeasePoolOperator(task_id="lease", size=2, pool_name=POOL) >> CleanupPoolOperator(task_id="end", pool_name=POOL)
    ScaleClusterOperator(task_id="scale", expected_cluster_size=2, pool_name=POOL)
    CheckModelsOperator(task_id="models", promoted_within=timedelta(days=1))
    SweepPoolsOperator(task_id="sweep")

parsed()
"""
CODE = """
import runpy, sys, time
import airflow.sdk, airflow.sdk.execution_time.supervisor
before, begin = len(sys.modules), time.process_time()
runpy.run_path(sys.argv[1])
print(time.process_time() - begin, len(sys.modules) - before)
"""


def _turn(file: Path) -> tuple[float, int]:
    """The CPU seconds for the file, and the number of modules that it imported."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "AIRFLOW_HOME": home, "SHOAL_HOME": f"{home}/shoal"}
        ran = subprocess.run(
            [sys.executable, "-c", CODE, str(file)], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    took, modules = ran.stdout.splitlines()[-1].split()
    return float(took), int(modules)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time DAG files.")
    parser.add_argument("--repeat", type=int, default=7, help="turns, of which the median counts (default 7)")
    repeat = parser.parse_args(argv).repeat
    turns: dict[str, list[tuple[float, int]]] = {"standard operators": [], "all operators of shoal": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, body in zip(turns, (STANDARD, OURS), strict=True):
            Path(folder, f"{name}.py").write_text(HEAD + body)
        for name in [*turns] * (repeat + 1):  # the first turn writes the compiled files
            turns[name].append(_turn(Path(folder, f"{name}.py")))
    rows, standard = [], 0.0
    for name, taken in turns.items():
        took = median(seconds for seconds, _ in taken[1:])
        standard = standard or took
        rows.append((name, f"{took * 1000:.0f}", f"{(took - standard) * 1000:+.0f}", str(taken[-1][1])))
    print(table(("DAG file", "ms", "against standard, ms", "modules"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
