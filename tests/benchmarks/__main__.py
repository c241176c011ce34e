"""``make bench``: every benchmark, each with its peers in the same run; prints the ratios, the date and the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys

BENCHMARKS = ("tests.benchmarks.xgboost_flights", "tests.benchmarks.pool_scaling")
LIBRARIES = ("ray", "xgboost-cpu", "pyarrow")


def main() -> int:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES)
    cpus = len(os.sched_getaffinity(0))
    machine = f"{cpus} CPUs ({platform.machine()}), Python {platform.python_version()}"
    print(f"{datetime.date.today()}, {machine}, {versions}\n", flush=True)
    return max(subprocess.run([sys.executable, "-m", name], check=False).returncode for name in BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main())
