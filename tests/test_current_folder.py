"""No process of shoal imports from the folder in which a user starts it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal import reconciler
from shoal.os_processes import import_folders, python_command
from shoal.pool import reconciling
from shoal.pool.backends import ray_http
from shoal.pool.backends.local import gpus
from shoal.pool.backends.local.backend import _ASK_VERSIONS
from shoal.pool.endpoint import driver_command
from shoal.secrets import hidden_output
from tests.support import ROOT

PACKAGE = Path(shoal.__file__).parent
SHOAL = Path(sys.executable).with_name("shoal")

JOB = """
import pandas
from shoal.jobs import parse_spec, submit
from beside import COLUMNS

pandas.DataFrame({name: range(20) for name in COLUMNS}).to_parquet("rows.parquet")
spec = {"dataset": {"paths": ["rows.parquet"]}, "input_cols": COLUMNS[:1], "label_col": COLUMNS[1], "n_estimators": 1}
submit(parse_spec({**spec, "run_config": {"pool_name": "traps"}})).wait()
"""


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A folder with a file for each module of the standard library. Each import of one adds its name to a list."""
    folder = tmp_path / "traps"
    folder.mkdir()
    for name in sorted(sys.stdlib_module_names - {"__main__"}):
        trap = f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + ' ')\nraise ImportError('a trap: {name}')\n"
        (folder / f"{name}.py").write_text(trap)
    return folder


def imported(folder: Path) -> str:
    """The traps that were imported."""
    found = folder.parent / "imported"
    return found.read_text() if found.exists() else ""


def own_modules() -> list[str]:
    """The modules that the code and the manifests start with ``-m``."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    texts += [path.read_text() for path in (ROOT / "docker").rglob("*.yaml")]
    found = {name for text in texts for name in re.findall(r'"-m", "(shoal[\w.]+)"', text)}
    return sorted((found | {"shoal.pool.supervisor"}) - {"shoal.reconciler", "shoal.jobs.reconcile.rounds"})


COMMANDS = {
    **{module: python_command("-m", module, "no-such-argument") for module in own_modules()},
    "reconciler": reconciling.COMMAND,
    "settle": reconciler._SETTLE_COMMAND,
    "driver on a head": driver_command(sys.executable, "no-such-job", "1"),
    "script on a head": ["sh", "-c", ray_http._RUN, "import queue, json, platform, uuid", "{}"],
    "question for versions": python_command("-c", _ASK_VERSIONS),
    "question for GPUs": python_command("-c", gpus._ASK_RAY),
    "reader of the output": python_command("-c", hidden_output._START.replace("os.fork() and os._exit(0)", "0")),
    "shoal": [str(SHOAL), "--help"],
}


@pytest.mark.processes
@pytest.mark.parametrize("name", COMMANDS)
def test_an_entry_point_imports_nothing_from_the_current_folder(name: str, traps: Path, fresh_home: Path):
    environment = {**os.environ, "SHOAL_PYTHON": sys.executable, "PYTHONPATH": ""}
    ended = subprocess.run(
        COMMANDS[name], cwd=traps, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )

    assert (imported(traps), "a trap" in ended.stderr) == ("", False)


@pytest.mark.processes
def test_a_pool_and_its_jobs_import_nothing_from_the_current_folder(traps: Path, fresh_home: Path):
    script = traps.parent / "project" / "train.py"
    script.parent.mkdir()
    script.write_text(JOB)
    (script.parent / "beside.py").write_text("COLUMNS = ['a', 'b']\n")
    environment = {**os.environ, "PYTHONPATH": ""}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=traps, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "traps" in run(SHOAL, "pool", "up", "local://traps?ray=false&max_nodes=1")
    try:
        assert "model trained on 20 rows" in run(sys.executable, script)
        run(SHOAL, "sweep")
    finally:
        run(SHOAL, "pool", "down", "traps")
    assert imported(traps) == ""


def test_an_empty_name_in_pythonpath_is_not_inherited():
    assert import_folders(":/a::relative:") == ["/a", "relative"]


def test_every_process_is_started_by_the_one_command():
    def starts_python(node: ast.AST) -> bool:
        return isinstance(node, ast.List) and any(ast.unparse(item) == "sys.executable" for item in node.elts[:1])

    isolated = '[sys.executable, "-I", "-S", "-c", _DETACH, *argv]'
    found = [
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if starts_python(node) and ast.unparse(node) != ast.unparse(ast.parse(isolated))
    ]
    assert found == []
