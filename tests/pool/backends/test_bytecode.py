"""Nodes of a machine on which the packages are not compiled, as after an installation with uv."""

from __future__ import annotations

import py_compile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from shoal.cli.doctor_checks import _bytecode
from shoal.pool.backends.local import backend
from shoal.pool.backends.local.backend import inherited_environment


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only package that nodes import, not compiled."""
    (tmp_path / "ray").mkdir()
    source = tmp_path / "ray" / "__init__.py"
    source.write_text("")
    monkeypatch.setattr(backend, "find_spec", lambda name: ModuleSpec(name, None, origin=str(source)))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    return source


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the package read-only, also for root."""
    return lambda: monkeypatch.setattr(backend, "can_be_written", lambda source: False)


def test_nodes_compile_the_packages_once(fresh_home, package, read_only, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert not {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"} & inherited_environment().keys()
    read_only()
    assert inherited_environment()["PYTHONPYCACHEPREFIX"] == str(fresh_home / "bytecode")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/cache")
    assert inherited_environment()["PYTHONPYCACHEPREFIX"] == "/cache"


def test_compiled_packages_are_used_where_they_are(fresh_home, package, read_only):
    py_compile.compile(str(package))
    read_only()
    assert "PYTHONPYCACHEPREFIX" not in inherited_environment()
    assert _bytecode().status == "ok"


def test_the_doctor_says_that_the_packages_are_not_compiled(package, read_only):
    assert "not compiled, so the first node starts slowly" in _bytecode().found
    assert _bytecode().advice == f"python -m compileall -q {package.parents[1]}"
    read_only()
    assert "nodes may not write there" in _bytecode().found
