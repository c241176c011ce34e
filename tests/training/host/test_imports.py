"""A library that was imported without scikit-learn is complete when the user's code runs, and the same as before."""

from __future__ import annotations

import subprocess
import sys

import pytest

_DESCRIBE = """
def described(library):
    # Classes with their bases, and what is true or missing, in all modules of a library.
    import sys
    found = []
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == library:
            for key, value in sorted(vars(module).items()):
                if isinstance(value, type):
                    assert value is getattr(sys.modules[value.__module__], value.__qualname__, value), (name, key)
                    value = [f"{base.__module__}.{base.__qualname__}" for base in value.__mro__]
                elif not (value is None or isinstance(value, bool)) or key.startswith("__"):
                    continue
                found.append(f"{name}.{key}: {value}")
    return found
"""

_PROGRAM = """
from shoal.training.gang.worker import Worker
library, estimator = sys.argv[1:]
names = [f"shoal.training.{library}.worker", "pandas"]
Worker().preload(names, complete=False)
assert "sklearn" not in sys.modules and not sys.modules[f"{library}.compat"].SKLEARN_INSTALLED
before = {name: module for name, module in sys.modules.items() if module is not None}
Booster = sys.modules[library].Booster
Worker().preload(names, complete=True)
assert {name: sys.modules.get(name) for name in before} == before
assert sys.modules[library].Booster is Booster
getattr(sys.modules[library], estimator)(n_estimators=3).fit([[0.0], [1.0], [2.0]], [0, 1, 2])
print(*described(library), sep="\\n")
"""

_UNUSED = """
from shoal.training.host.imports import complete_libraries, import_lean
library = sys.argv[1]
import_lean([library])
complete_libraries()
assert library not in sys.modules and "sklearn" not in sys.modules
importlib.import_module(library)
print(*described(library), sep="\\n")
"""

_PLAIN = """
importlib.import_module(sys.argv[1])
print(*described(sys.argv[1]), sep="\\n")
"""


def said(program: str, *arguments: str) -> list[str]:
    text = f"import importlib, sys\n{_DESCRIBE}\n{program}"
    run = [sys.executable, "-W", "ignore", "-c", text, *arguments]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if not line.startswith("[LightGBM]")]


@pytest.mark.processes
@pytest.mark.parametrize(("library", "estimator"), [("xgboost", "XGBRegressor"), ("lightgbm", "LGBMRegressor")])
def test_the_users_code_finds_the_complete_library_and_no_module_twice(library: str, estimator: str) -> None:
    plain = said(_PLAIN, library)
    assert f"{library}.compat.SKLEARN_INSTALLED: True" in plain
    assert said(_PROGRAM, library, estimator) == plain
    assert said(_UNUSED, library) == plain
