"""New environments with the built wheel."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture(scope="session")
def wheel_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A function that builds the wheel of a folder once."""

    @functools.cache
    def build(tree: Path) -> Path:
        folder = tmp_path_factory.mktemp("wheel")
        subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", folder, tree], check=True)
        (built,) = folder.glob("*.whl")
        return built

    return build


@pytest.fixture
def in_new_environment(
    wheel_of: Callable[[Path], Path], fresh_home: Path, tmp_path: Path
) -> Callable[..., Callable[..., str]]:
    """Install the wheel with extras and what else uv is told; returns a function that runs a command of that
    environment."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW__")}
    variables |= {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    variables["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"  # the first start compiles all of Prefect
    variables["VIRTUAL_ENV"] = str(tmp_path / "environment")
    variables.pop("PYTHONPATH", None)
    if links := os.environ.get("PIP_FIND_LINKS"):
        variables["UV_FIND_LINKS"] = links  # uv ignores pip's variable

    def run(*command: str | Path, folder: Path = tmp_path, check: bool = True) -> str:
        ran = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert ran.returncode == 0 or not check, ran.stdout
        return ran.stdout

    def install(
        python: str, extras: str, *more: str, distribution: str = "shoal", tree: Path = ROOT
    ) -> Callable[..., str]:
        run("uv", "venv", "--quiet", "--python", python, "environment")
        run("uv", "pip", "install", "--quiet", f"{distribution}[{extras}] @ {wheel_of(tree).as_uri()}", *more)
        run("uv", "pip", "check", "--quiet")
        return lambda name, *args, **options: run(tmp_path / "environment" / "bin" / name, *args, **options)

    return install
