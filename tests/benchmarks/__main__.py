"""``make bench``: every benchmark, each with its peers in the same run; prints tables, the date and the machine.

With ``--write`` the tables go into ``docs/benchmarks.md``, each between its own two comments.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "gradient_boosting",
    "calls",
    "small_models",
    "workers",
    "limited_memory",
    "pool_scaling",
    "first_seconds",
    "pytorch",
    "store_load",
    "batch_prediction",
    "sql_rows",
    "tuning",
    "job_queue",
    "deferred_waits",
    "simulation",
    "dag_parsing",
    "plugin_imports",
    "ui_first_view",
)
ONLY_BY_NAME = ("kuberay",)
"""Benchmarks that need more than `make bench` installs."""

LIBRARIES = ("ray", "xgboost-cpu", "lightgbm", "torch", "pyarrow", "dask", "pyspark")
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, *ONLY_BY_NAME, []], help="which (default: all)")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    args = parser.parse_args()
    print(machine(), end="\n\n", flush=True)
    code = 0
    for name in args.names or BENCHMARKS:
        ran = subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], stdout=subprocess.PIPE, text=True,
                             check=False)  # fmt: skip
        print(ran.stdout, flush=True)
        code = max(code, ran.returncode)
        if args.write and ran.returncode == 0:
            _write(name, f"{machine()}\n\n{_tables(ran.stdout)}\n")
    return code


def machine() -> str:
    """The date, the machine and what is installed."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in LIBRARIES if name in installed)
    cpus = len(os.sched_getaffinity(0))
    python = platform.python_version()
    return f"{datetime.date.today()}, {cpus} CPUs ({platform.machine()}), Python {python}, {versions}"


def _tables(output: str) -> str:
    """What a benchmark printed, without what its peers did."""
    lines = [line if line.startswith("|") else "" for line in output.splitlines()]
    return re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip()


def _write(name: str, text: str) -> None:
    page = PAGE.read_text()
    written, found = re.subn(
        rf"(<!-- bench: {name} -->\n).*?(<!-- end -->)", lambda match: match[1] + text + match[2], page, flags=re.DOTALL
    )
    if not found:
        raise SystemExit(f"{PAGE} has no place for {name}")
    PAGE.write_text(written)


if __name__ == "__main__":
    sys.exit(main())
