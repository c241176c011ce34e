"""Code of the user reaches a process that cannot import it, wherever it is used."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import lightgbm
import pytest
import xgboost
from sklearn.metrics import make_scorer

from shoal.training.boosting.params import UserCode
from shoal.training.pickling import Pickled, pickled

_BESIDE = """
class Rate:
    def __init__(self, value): self.value = value
    def at(self, *_): return self.value * half()
def half(*_): return 0.5
"""
_MINE = """
from functools import wraps
import beside_the_script
from beside_the_script import Rate
def half(*_): return beside_the_script.half()
@wraps(half)
def wrapped(*_): return half()
rate = Rate(1)
"""


@dataclass
class Holder:
    """Of a module of which the receiver has a copy, like an object of a library."""

    function: Any


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module beside the user's script, which uses another one."""
    (tmp_path / "beside_the_script.py").write_text(_BESIDE)
    (tmp_path / "mine_only.py").write_text(_MINE)
    monkeypatch.syspath_prepend(tmp_path)
    import mine_only  # type: ignore[import-not-found]

    yield mine_only
    for name in ("mine_only", "beside_the_script"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("wrap", "call"),
    [
        (lambda mine: mine.half, lambda got: got()),
        (lambda mine: mine.wrapped, lambda got: got()),
        (lambda mine: partial(partial(mine.half), 1), lambda got: got()),
        (lambda mine: partial(lambda function: function(), mine.half), lambda got: got()),
        (lambda mine: mine.rate.at, lambda got: got()),
        (lambda mine: Holder([mine.half]), lambda got: got.function[0]()),
        (lambda mine: Holder(mine.rate), lambda got: got.function.at()),
        (lambda mine: make_scorer(mine.half), lambda got: got._score_func()),
        (lambda mine: lightgbm.reset_parameter(learning_rate=mine.half), lambda got: got.kwargs["learning_rate"](0)),
        (lambda mine: xgboost.callback.LearningRateScheduler(mine.rate.at), lambda got: got.learning_rates(0)),
    ],
)
def test_functions_are_sent_with_their_code(
    mine: ModuleType, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any], call: Callable[[Any], Any]
) -> None:
    user_code = UserCode((wrap(mine),), mine.half, (mine.rate.at,))
    content = pickle.dumps(Pickled(pickled(user_code, "callbacks")))
    assert cloudpickle.list_registry_pickle_by_value() == set()
    monkeypatch.undo()
    for name in ("mine_only", "beside_the_script"):
        del sys.modules[name]
    got = pickle.loads(content)
    assert type(got) is UserCode
    assert call(got.callbacks[0]) == got.objective() == got.metrics[0]() == 0.5
    assert {"mine_only", "beside_the_script"}.isdisjoint(sys.modules)


def test_a_module_with_a_lock_is_sent_by_its_name(mine: ModuleType) -> None:
    import threading

    sys.modules["beside_the_script"].lock = threading.Lock()  # type: ignore[attr-defined]
    assert cloudpickle.loads(pickled(mine.half, "it"))() == 0.5
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_callbacks_share_the_variables_of_their_closures() -> None:
    seen: list[int] = []
    user_code = UserCode((lambda: seen.append(1), partial(lambda given: given, seen)), lambda: len(seen))
    first, second = (pickle.loads(pickle.dumps(Pickled(pickled(user_code, "it")))) for _ in range(2))
    first.callbacks[0]()
    assert (first.callbacks[1](), first.objective(), second.objective(), seen) == ([1], 1, 0, [])
