"""The first jobs on a new pool: the start of three nodes, then three small trainings, each with an MLflow run. And the
first training in a script of its own, from the start of its interpreter to its end, beside the plain library and Dask,
and the first step of a PyTorch function, beside torchrun.

Every turn has a new home, so a new pool, a new store and a new MLflow database. *Before training* is `JobTimes.start`:
from the submission until the workers read. The seconds of CPU are those of all processes of the turn since the row
before: of the client, of the pool's nodes and of their drivers and workers.

Run it with ``python -m tests.benchmarks.first_seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.benchmarks import peers
from tests.benchmarks.datasets import small
from tests.benchmarks.process_tree import tree, with_variable
from tests.benchmarks.report import table

JOBS = ("first job", "second job", "third job")
FITS = (peers.plain, peers.dask)
WORKERS = 2

_CLIENT = """
import json, sys, time
uri, files, columns, label = json.loads(sys.argv[1])
from shoal import ComputePool
from shoal.jobs import parse_spec, submit
def note(**values):
    print("NOTE", json.dumps(values), flush=True)
    sys.stdin.readline()
note(seconds=0)
began = time.perf_counter()
pool = ComputePool(uri).up()
note(seconds=time.perf_counter() - began)
for _ in range(3):
    began = time.perf_counter()
    spec = {"framework": "xgboost", "dataset": {"paths": files}, "input_cols": columns, "label_col": label,
            "n_estimators": 5, "run_config": {"pool_name": pool.name}}
    result = submit(parse_spec(spec)).wait()
    note(seconds=time.perf_counter() - began, start=result.times.start)
pool.down()
"""


_SHOAL = """
import json, sys
files, columns, label, rounds = json.loads(sys.argv[1])
from shoal.data import DataConnector
from shoal.distributors.xgboost import XGBEstimator
if __name__ == "__main__":
    XGBEstimator(rounds).fit(DataConnector.from_parquet(files), columns, label)
"""

_PEER = """
import sys
from pathlib import Path
from tests.benchmarks import peers
from tests.benchmarks.datasets import small
if __name__ == "__main__":
    with getattr(peers, sys.argv[2])("xgboost", int(sys.argv[3])) as fit:
        fit(small(Path(sys.argv[1])))
"""

_STEP = """
def train():
    import torch
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    torch.distributed.destroy_process_group()
"""

_STEP_SHOAL = f"""
if __name__ == "__main__":
    from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig
    PyTorchDistributor(train, PyTorchScalingConfig(num_nodes=1, num_workers_per_node={WORKERS})).run()
"""


def turn(uri: str, given: Sequence[Any]) -> list[dict[str, float]]:
    """Bring a pool up and train three times in a new home; return the figures of each step."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as home:
        environment = {**os.environ, "SHOAL_HOME": home}
        command = [sys.executable, "-c", _CLIENT, json.dumps([uri, *given])]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            steps = list(_steps(client, home))
        if client.returncode or len(steps) != 1 + len(JOBS):
            raise SystemExit(f"the turn failed with exit code {client.returncode}")
    return steps


def _steps(client: subprocess.Popen[str], home: str) -> Iterator[dict[str, float]]:
    assert client.stdin and client.stdout
    before = None
    for line in client.stdout:
        if not line.startswith("NOTE "):
            continue
        used = _cpu_seconds(home)
        if before is not None:
            yield {**json.loads(line[5:]), "cpu": used - before}
        before = used
        client.stdin.write("\n")
        client.stdin.flush()


def first_fits(folder: Path, repeat: int) -> list[list[str]]:
    """Train with XGBoost in scripts of their own; return the rows of the table."""
    data = small(folder)
    given = json.dumps([data.files, data.features, data.label, data.rounds])
    sides = {"shoal": [_SHOAL, given]}
    for peer in FITS:
        if peer is not peers.dask or find_spec("distributed"):
            sides[peer.__name__] = [_PEER, str(folder), peer.__name__, str(WORKERS)]
    return _scripts({name: ([], *script) for name, script in sides.items()}, "plain", repeat)


def first_steps(repeat: int) -> list[list[str]]:
    """Do the first step of a PyTorch function in two ranks of scripts of their own; return the rows of the table."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    return _scripts({"shoal": ([], _STEP + _STEP_SHOAL), "torchrun": (torchrun, _STEP + "train()")}, "torchrun", repeat)


def _scripts(sides: Mapping[str, tuple[Any, ...]], peer: str, repeat: int) -> list[list[str]]:
    """Run each script `repeat` times, in turns, each with a new home.

    Args:
        sides: By name: arguments of Python before the script, the script's code, and its arguments.
        peer: Name of the side with which the others are compared.
        repeat: Number of turns.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeat):
        for name, (before, code, *arguments) in sides.items():
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as home:
                script = Path(home, "script.py")  # Dask starts its workers by running the script again
                script.write_text(code)
                environment = {**os.environ, "SHOAL_HOME": home, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
                began = time.perf_counter()
                subprocess.run([sys.executable, *before, script, *arguments], env=environment, check=True)
                seconds[name].append(time.perf_counter() - began)
    least = median(seconds[peer])
    return [
        [name, f"{median(each):.1f}", f"{min(each):.1f} to {max(each):.1f}", f"{median(each) / least:.2f}"]
        for name, each in seconds.items()
    ]


def _cpu_seconds(home: str) -> float:
    """Return the seconds of CPU of all processes of a turn, and of their children that have ended."""
    # Ray's agents overwrite their environment, so they are found as children of the supervisors.
    seconds = {}
    for pid in {each for found in with_variable("SHOAL_HOME", home) for each in tree(found)}:
        with suppress(psutil.Error):
            seconds[pid] = sum(psutil.Process(pid).cpu_times()[:4])
    return sum(seconds.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the start of a new pool and its first three jobs.")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the pool (default 3)")
    parser.add_argument("--options", default="libraries=xgboost,mlflow", help="options of the pool's URI")
    parser.add_argument("--repeat", type=int, default=5, help="turns, of which the median counts (default 5)")
    args = parser.parse_args(argv)
    uri = f"local://first-seconds?min_nodes={args.nodes}&max_nodes={args.nodes}&{args.options}".rstrip("&")
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        data = small(Path(folder, "flights"))
        turns = [turn(uri, (data.files, data.features, data.label)) for _ in range(args.repeat)]
        fits, steps = first_fits(Path(folder, "flights"), args.repeat), first_steps(args.repeat)
    rows = []
    for number, name in enumerate(("pool up", *JOBS)):
        of_turns = [each[number] for each in turns]
        starts = [step["start"] for step in of_turns if "start" in step]
        whole, cpu = (f"{median(step[key] for step in of_turns):.1f}" for key in ("seconds", "cpu"))
        spread = f"{min(starts):.1f} to {max(starts):.1f}" if starts else ""
        rows.append([name, f"{median(starts):.1f}" if starts else "", spread, whole, cpu])
    head = [f"pool of {args.nodes}", "before training, s", "least to most", "whole, s", "CPU, s"]
    print(table(head, rows))
    print()
    print(table(["first fit in a script", "s", "least to most", "x plain"], fits))
    print()
    print(table([f"first step of PyTorch, {WORKERS} ranks", "s", "least to most", "x torchrun"], steps))


if __name__ == "__main__":
    main()
