"""Which changes of a function change its digest, and that all processes compute the same one."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from shoal.training.pickling import code_digest

SOURCE = """
RATE = 0.1
UNUSED = 1

def clean(rows):
    return [row for row in rows if row in {"a", "b", "c"}]

class Model:
    depth = 3
    def fit(self, rows):
        return (len(rows), self.depth, RATE)

def made(extra):
    def train(rows, model=Model, *, seed=7):
        return clean(rows), model().fit(rows), extra, seed
    return train

train = made(5)
"""


def function(source: str = SOURCE, file: str = "dag.py") -> Callable[..., Any]:
    """The function `train` of a module that is sent by value."""
    module = types.ModuleType("a_dag_file")
    exec(compile(source, file, "exec"), vars(module))
    return module.train


def test_comments_lines_files_and_unused_variables_do_not_count():
    changed = SOURCE.replace("def clean", "\n\n# a comment\ndef clean").replace("UNUSED = 1", "UNUSED = 2")
    assert code_digest(function(changed, "/elsewhere/dag.py")) == code_digest(function())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("clean(rows), model", "clean(rows)[:1], model"),
        ("if row in", "if row not in"),
        ('"c"', '"d"'),
        ("RATE = 0.1", "RATE = 0.2"),
        ("depth = 3", "depth = 4"),
        ("self.depth, RATE", "RATE, self.depth"),
        ("made(5)", "made(6)"),
        ("seed=7", "seed=8"),
        ("model=Model", "model=dict"),
    ],
)
def test_code_and_values_that_the_function_uses_count(old: str, new: str):
    assert old in SOURCE
    assert code_digest(function(SOURCE.replace(old, new))) != code_digest(function())


def test_arguments_count_also_if_they_are_no_plain_data():
    of = [code_digest(functools.partial(function(), types.SimpleNamespace(rows={"a", value}))) for value in "bbc"]
    assert of[0] == of[1] != of[2]


def test_of_installed_code_only_the_name_counts(monkeypatch: pytest.MonkeyPatch):
    before = code_digest(subprocess.run)
    monkeypatch.setattr(subprocess.run, "__defaults__", (1,))
    assert code_digest(subprocess.run) == before != code_digest(subprocess.call)


def test_objects_may_contain_themselves_and_objects_that_cannot_be_pickled():
    ring: list[Any] = [sys.stdout]
    ring.append(ring)
    assert code_digest(ring) == code_digest(ring) != code_digest([ring])


def test_of_a_named_object_only_the_name_counts():
    def digest(*values: object) -> str:
        return code_digest(values, lambda value: "a stream" if value in (sys.stdin, sys.stdout) else None)

    assert digest(sys.stdin, 1) == digest(sys.stdout, 1) != digest(sys.stderr, 1)


@pytest.mark.processes
def test_another_process_computes_the_same_digest():
    program = "import tests.training.test_code_digest as t; print(t.code_digest(t.function()))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == code_digest(function())
