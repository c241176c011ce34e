"""Importing a library without the optional ones that it would import with it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable

NOT_NEEDED = ("sklearn",)
"""What XGBoost and LightGBM import for their wrappers of scikit-learn's interface, where it is installed.

It makes up three quarters of the time that they take to import (4 to 5 s of 6 in each worker of a slow machine with two
cores); a training uses boosters only.
"""


def import_lean(modules: Iterable[str], absent: Iterable[str] = NOT_NEEDED) -> None:
    """Import modules as if others were not installed; for processes of shoal's own, never for a user's.

    What is imported already stays as it is, and what is left out can be imported later by itself.

    Args:
        modules: What to import; one that is missing is left out, because whoever needs it will say so.
        absent: Packages that the modules can do without.
    """
    hidden = [name for name in absent if name not in sys.modules]
    # An entry that is None makes an import fail as that of a missing package does.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    finally:
        for name in hidden:
            del sys.modules[name]
