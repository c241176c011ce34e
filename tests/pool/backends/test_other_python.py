"""A local pool whose nodes run in another Python environment than the process that starts it."""

from __future__ import annotations

import os
import site
import sys
import venv
from pathlib import Path

import psutil
import pytest

from shoal.errors import InvalidArgumentError
from shoal.pool.api import ComputePool
from shoal.pool.backends import versions
from shoal.pool.backends.local.backend import LocalBackend
from shoal.pool.spec import PoolSpec
from tests.support.pool_processes import node_rows, nothing_left

pytestmark = pytest.mark.processes


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of a new environment, in which the packages of this one can be imported."""
    venv.create(tmp_path / "other", symlinks=True)
    [packages] = (tmp_path / "other" / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()]
    (packages / "these.pth").write_text("\n".join(lines))
    return tmp_path / "other" / "bin" / "python"


def test_nodes_run_in_the_environment_of_the_pool(fresh_home: Path, python: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    pool = ComputePool(f"local://other?max_nodes=1&ray=false&python={python}").up()
    try:
        [node] = node_rows()
        assert versions.recorded(node.endpoint)["prefix"] == str(python.parents[1])
        supervisor = psutil.Process(node.supervisor["pid"])
        assert supervisor.cmdline()[0] == str(python)
        assert supervisor.environ()["SHOAL_PYTHON"] == str(python)
        assert "VIRTUAL_ENV" not in supervisor.environ()
    finally:
        pool.down()
    nothing_left()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "No such file or directory"),
        ("exit 1", "returned non-zero exit status 1"),
        ("echo 0.0.1 True", "has shoal 0.0.1, and this process runs shoal"),
        (f"echo {versions.mine()['shoal']} False", r'has no Ray: pip install "shoal\[ray\]" there'),
    ],
)
def test_an_interpreter_that_cannot_run_nodes_is_refused(tmp_path: Path, code: str | None, said: str):
    python = tmp_path / "python"
    if code is not None:
        python.write_text(f"#!/bin/sh\n{code}\n")
        os.chmod(python, 0o700)
    spec = PoolSpec.parse(f"local://x?python={python}")
    with pytest.raises(InvalidArgumentError, match=f"python={python} cannot run the nodes of this pool: .*{said}"):
        LocalBackend().admit(spec, 1)


def test_only_local_pools_have_an_interpreter_and_its_path_is_absolute():
    with pytest.raises(InvalidArgumentError, match="python=python3 is not an absolute path"):
        PoolSpec.parse("local://x?python=python3")
    with pytest.raises(InvalidArgumentError, match="that are allowed only for local:// pools: python;"):
        PoolSpec.parse("ray://x?address=http://h:1&python=/usr/bin/python3")
