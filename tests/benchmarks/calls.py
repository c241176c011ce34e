"""From a call to the model where users call: a script, the CLI, an Airflow task, a Prefect task; plain and Dask beside.

Every turn is a new process. *First* is the time from its start, so with all imports, with Dask's `LocalCluster` and
with the embedded pool of a script. The CLI and the tasks use a pool that is up, and the time of the engine before a
task does not count. *Second* is the same call again. The split is shoal's own (`JobResult.times`), of the last call.
*Peak* is the memory of all processes that took part, the pool's included, in one more turn that is not timed.

Run it with ``python -m tests.benchmarks.calls``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

from tests.benchmarks.datasets import MAKE, Data
from tests.benchmarks.process_tree import PeakMemory, tree, with_variable
from tests.benchmarks.report import table

POOL = "where-users-stand"

_HEAD = """
import json, sys, time
began = time.perf_counter()
files, columns, label, rounds, cpus, job = json.loads(sys.argv[1])
def note(seconds):
    print("SECONDS", seconds, flush=True)
def timed(fit):
    for first in (began, None):
        first = first or time.perf_counter()
        fit()
        note(time.perf_counter() - first)
"""

PLAIN = """
import pyarrow.parquet as pq, xgboost
def fit():
    rows = pq.read_table(files, columns=[*columns, label])
    matrix = xgboost.QuantileDMatrix(rows.select(columns), rows[label].to_numpy(), nthread=cpus)
    xgboost.train({"nthread": cpus}, matrix, rounds)
timed(fit)
"""

DASK = """
import tempfile
import dask.dataframe
from distributed import Client, LocalCluster
from xgboost import dask as dxgb
def fit():
    frame = dask.dataframe.read_parquet(files, columns=[*columns, label]).persist()
    matrix = dxgb.DaskQuantileDMatrix(client, frame[columns], frame[label])
    dxgb.train(client, {"nthread": 1}, matrix, rounds)
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch, LocalCluster(
        cpus, threads_per_worker=1, dashboard_address=None, local_directory=scratch, memory_limit=0
    ) as cluster, Client(cluster) as client:
        timed(fit)
"""

SCRIPT = """
from shoal.data import DataConnector
from shoal.distributors.xgboost import XGBEstimator
timed(lambda: XGBEstimator(rounds).fit(DataConnector.from_parquet(files), columns, label))
"""

CLI = """
import subprocess
timed(lambda: subprocess.run([f"{sys.prefix}/bin/shoal", "train", job], check=True))
"""

AIRFLOW = """
from datetime import UTC, datetime
from airflow.sdk import DAG
from shoal.airflow.operators import DistributedTrainOperator
class Timed(DistributedTrainOperator):
    def execute(self, context):
        first = time.perf_counter()
        try:
            return super().execute(context)
        finally:
            note(time.perf_counter() - first)
with DAG("timed", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)) as dag:
    spec = json.load(open(job))
    first = Timed(task_id="first", spec=spec, pool_name=spec["run_config"]["pool_name"])
    first >> Timed(task_id="second", spec=spec, pool_name=spec["run_config"]["pool_name"])
if __name__ == "__main__":  # Airflow imports this file once more
    dag.test()
"""

PREFECT = """
from prefect import flow
from shoal.jobs import JobSpec
from shoal.prefect import distributed_train
@flow(log_prints=True)
def timed_flow():
    spec = JobSpec.parse(json.load(open(job)))
    for _ in range(2):
        first = time.perf_counter()
        distributed_train(spec, pool_name=spec.run_config.pool_name)
        note(time.perf_counter() - first)
timed_flow()
"""

WAYS = {
    "plain, script": PLAIN,
    "Dask, script": DASK,
    "shoal, script": SCRIPT,
    "shoal train": CLI,
    "Airflow task": AIRFLOW,
    "Prefect task": PREFECT,
}
_ON_POOL = {"shoal train", "Airflow task", "Prefect task"}


def turn(way: str, data: Data, cpus: int, job: Path, environment: dict[str, str]) -> tuple[list[float], str]:
    """Call twice in a new process; return the seconds of each call, and the split of the last one."""
    given = json.dumps([data.files, data.features, data.label, data.rounds, cpus, str(job)])
    # Dask's workers import the main module, and Airflow runs DAGs of its folder only.
    code = Path(environment["AIRFLOW_HOME"], "dags", "call.py")
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text(_HEAD + WAYS[way])
    ran = subprocess.run([sys.executable, str(code), given], env=environment, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    seconds = [float(line.split("SECONDS")[1]) for line in ran.stdout.splitlines() if "SECONDS" in line]
    if ran.returncode or len(seconds) != 2:
        raise SystemExit(f"{way} failed:\n{ran.stdout}")
    splits = [line.split("seconds: ")[1].split(" [")[0] for line in ran.stdout.splitlines() if "seconds: queue" in line]
    return seconds, splits[-1] if splits else ""


def _processes(home: str) -> set[int]:
    """Return the ids of all processes of a turn: the descendants of this process, and the daemons of shoal's pools.

    Dask's workers overwrite their environment with a process title, so the variable alone does not find them.
    """
    return {*tree(os.getpid())[1:], *with_variable("SHOAL_HOME", home)}


def _environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "SHOAL_HOME": str(home / "shoal"),
        "AIRFLOW_HOME": str(home / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Time calls from scripts, the CLI and tasks, with all that they start."
    )
    parser.add_argument("--data", choices=MAKE, default="flights", help="dataset (default flights)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="turns, of which the median counts (default 3)")
    args = parser.parse_args(argv)
    cpus = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        home = Path(folder)
        (home / "shoal").mkdir(mode=0o700)
        data, environment = MAKE[args.data](home), _environment(home)
        job = home / "job.json"
        spec = {"framework": "xgboost", "dataset": {"paths": list(data.files)}, "input_cols": list(data.features),
                "label_col": data.label, "n_estimators": data.rounds, "run_config": {"pool_name": POOL}}  # fmt: skip
        job.write_text(json.dumps(spec))

        def run(*command: str) -> None:
            program = Path(sys.executable).with_name(command[0])
            subprocess.run([program, *command[1:]], env=environment, check=True, stdout=subprocess.DEVNULL)

        @contextmanager
        def pool() -> Iterator[None]:
            run("shoal", "pool", "up", f"local://{POOL}?max_nodes=1&cpus_per_node={cpus}")
            run("shoal", "train", str(job))  # for this job, the head imports the libraries of all jobs
            try:
                yield
            finally:
                run("shoal", "pool", "down", POOL)

        if "Airflow task" in args.ways:
            run("airflow", "db", "migrate")
        rows = []
        for way in args.ways:
            with pool() if way in _ON_POOL else nullcontext():
                turns = [turn(way, data, cpus, job, environment) for _ in range(args.repeat)]
                with PeakMemory(lambda: _processes(environment["SHOAL_HOME"])) as peak:
                    turn(way, data, cpus, job, environment)
            seconds = (f"{median(each[0][call] for each in turns):.1f}" for call in (0, 1))
            rows.append([way, *seconds, f"{peak.bytes >> 20:,}", turns[-1][1]])
        head = [f"xgboost, {data.name}, {data.rounds} rounds", "first, s", "second, s", "peak MiB",
                "of the last call, s"]  # fmt: skip
        print(table(head, rows))


if __name__ == "__main__":
    main()
