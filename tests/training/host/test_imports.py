"""A library that was imported without scikit-learn is complete when the user's code runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
from shoal.training.gang.worker import Worker
library, estimator = sys.argv[1:]
name = f"shoal.training.{library}.worker"
Worker().preload([name], complete=False)
assert "sklearn" not in sys.modules and not sys.modules[f"{library}.compat"].SKLEARN_INSTALLED
Worker().preload([name], complete=True)
compat = sys.modules[f"{library}.compat"]
own = [module for module in list(sys.modules) if module.startswith(f"shoal.training.{library}.")]
used = [vars(sys.modules[module])[library] for module in own if library in vars(sys.modules[module])]
assert used and all(module is sys.modules[library] for module in used)
getattr(sys.modules[library], estimator)(n_estimators=3).fit([[0.0], [1.0], [2.0]], [0, 1, 2])
print(sorted(name for name, value in vars(compat).items() if value is True))
print(sorted(name for name in vars(sys.modules[library])))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("library", "estimator"), [("xgboost", "XGBRegressor"), ("lightgbm", "LGBMRegressor")])
def test_a_worker_has_the_complete_library_for_the_users_code(library: str, estimator: str) -> None:
    run = [sys.executable, "-W", "ignore", "-c"]
    said = subprocess.run([*run, _PROGRAM, library, estimator], capture_output=True, text=True, check=True).stdout
    plain = (
        f"import {library}.compat\n"
        f"print(sorted(name for name, value in vars({library}.compat).items() if value is True))\n"
        f"print(sorted(name for name in vars({library})))"
    )
    theirs = subprocess.run([*run, plain], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-2:] == theirs.splitlines()
