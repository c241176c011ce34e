"""Scripts for a cluster that shares no folder with the orchestrator: the program of an orchestrator without Ray.

It prints how the jobs have ended, and what the scripts have said, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from shoal import ComputePool, RunConfig
from shoal.distributors.call import SubmittedCall
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, Response
from shoal.errors import ShoalError

SCRIPT = """
import json, os, signal, subprocess, sys
import torch
from helper import answer

torch.distributed.init_process_group("gloo")
rank, restarts = torch.distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
said = [
    answer(),
    open(sys.argv[2]).read(),
    open("project/gr\\u00f6\\u00dfe (1).txt").read(),
    open(os.path.join(os.path.dirname(__file__), "same", "a.txt")).read(),
    os.listdir("project/empty"),
    subprocess.run(["project/run.sh"], capture_output=True, text=True).stdout,
]
print("said", json.dumps([rank, restarts, *said]), flush=True)
torch.distributed.barrier()
if rank == 1 and restarts == 0:
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.barrier()
"""


def write_project() -> None:
    """Write the script and what it reads."""
    for folder in ("project/data", "project/empty", "conf"):
        Path(folder).mkdir(parents=True)
    Path("project/train.py").write_text(SCRIPT)
    Path("project/helper.py").write_text("def answer():\n    return 42\n")
    Path("project/größe (1).txt").write_text("large")
    Path("project/data/a.txt").write_text("a")
    Path("project/same").symlink_to("data")
    Path("project/run.sh").write_text("#!/bin/sh\necho ran")
    Path("project/run.sh").chmod(0o755)
    Path("conf/base.yaml").write_text("rate: 1")


def submit() -> SubmittedCall[Response]:
    """Submit the script."""
    config = RunConfig(pool_name="lab", artifact_location="s3://bucket/jobs", max_restarts=1)
    scaling = PyTorchScalingConfig(num_nodes=2)
    return PyTorchDistributor("project/train.py", scaling, config).submit("--config", "conf/base.yaml")


def main() -> dict[str, object]:
    """Run the script on two nodes of the cluster after its folder is gone, and once with a file that is too large."""
    pool = ComputePool(os.environ["POOL"]).up()
    pool.scale(2)
    write_project()
    call = submit()
    shutil.rmtree("project")
    shutil.rmtree("conf")
    call.result()
    said = [line.partition("said ")[2] for line in call.logs() if "said " in line]
    write_project()
    with Path("project/large").open("wb") as file:
        file.truncate(16 * 2**20 + 1)
    try:
        error = str(submit().result())
    except ShoalError as refused:
        error = str(refused)
    pool.down()
    return {"said": [json.loads(line) for line in said], "error": error}


if __name__ == "__main__":
    print(json.dumps(main()))
