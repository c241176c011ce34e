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

from tests.support import ROOT

_FIT = ("data", "distributors", "training")
_JOB = (*_FIT, "jobs", "kinds/training", "pool", "state")

BENCHMARKS = {
    "gradient_boosting": _JOB,
    "calls": (*_JOB, "airflow/operators", "cli", "prefect"),
    "small_models": _JOB,
    "workers": _FIT,
    "limited_memory": _FIT,
    "pool_scaling": ("pool",),
    "first_seconds": (*_JOB, "kinds/function"),
    "pytorch": (*_FIT, "kinds/function"),
    "store_load": ("jobs", "pool", "state"),
    "batch_prediction": (*_FIT, "kinds/prediction", "models"),
    "sql_rows": ("data",),
    "tuning": (*_JOB, "kinds/search", "tune"),
    "job_queue": _JOB,
    "deferred_waits": ("airflow", "jobs", "pool", "state"),
    "simulation": ("airflow", "jobs", "pool", "state", "ui"),
    "dag_parsing": ("airflow",),
    "plugin_imports": ("airflow", "ui"),
    "ui_first_view": ("state", "ui"),
    "kuberay": ("pool",),
}
"""The benchmarks, and the folders of `providers/shoal` that each measures."""

ONLY_BY_NAME = ("kuberay",)
"""Benchmarks that need more than `make bench` installs."""

LIBRARIES = ("ray", "xgboost-cpu", "lightgbm", "torch", "pyarrow", "dask", "pyspark")
PAGE = Path("docs/benchmarks.md")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="which (default: all)")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    args = parser.parse_args()
    changed = _git("status", "--porcelain", "--", "providers", "tests/benchmarks")
    if args.write and changed:
        parser.error(f"tables name the commit that they measure: commit or remove these changes first:\n{changed}")
    print(machine(), end="\n\n", flush=True)
    code = 0
    for name in args.names or [name for name in BENCHMARKS if name not in ONLY_BY_NAME]:
        ran = subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"], stdout=subprocess.PIPE, text=True,
                             check=False)  # fmt: skip
        print(ran.stdout, flush=True)
        code = code or abs(ran.returncode)  # negative: killed by a signal
        if args.write and ran.returncode == 0:
            _write(name, f"{machine()}\n\n{_tables(ran.stdout)}\n")
    return code


def machine() -> str:
    """Return the date, the commit, the machine and what is installed."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in LIBRARIES if name in installed)
    cpus = len(os.sched_getaffinity(0))
    python = platform.python_version()
    commit = _git("rev-parse", "--short", "HEAD")
    return f"{datetime.date.today()}, commit {commit}, {cpus} CPUs ({platform.machine()}), Python {python}, {versions}"


def stale_tables(root: Path = ROOT) -> list[str]:
    """Return the names of the tables whose code has changed since their commit, or whose commit is not known."""
    tables = re.findall(r"<!-- bench: (\w+) -->\n(?:.*?commit (\w+))?", (root / PAGE).read_text())
    return [name for name, commit in tables if not commit or _has_changed(root, name, commit)]


def _has_changed(root: Path, name: str, commit: str) -> bool:
    paths = [f"tests/benchmarks/{name}.py", *(f"providers/shoal/{folder}" for folder in BENCHMARKS[name])]
    command = ["git", "diff", "--quiet", commit, "HEAD", "--", *paths]
    return subprocess.run(command, cwd=root, check=False, stderr=subprocess.DEVNULL).returncode != 0


def _git(*command: str) -> str:
    ran = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def _tables(output: str) -> str:
    """What a benchmark printed, without what its peers did."""
    lines = [line if line.startswith("|") else "" for line in output.splitlines()]
    return re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip()


def _write(name: str, text: str) -> None:
    page = (ROOT / PAGE).read_text()
    written, found = re.subn(
        rf"(<!-- bench: {name} -->\n).*?(<!-- end -->)", lambda match: match[1] + text + match[2], page, flags=re.DOTALL
    )
    if not found:
        raise SystemExit(f"{PAGE} has no place for {name}")
    (ROOT / PAGE).write_text(written)


if __name__ == "__main__":
    sys.exit(main())
