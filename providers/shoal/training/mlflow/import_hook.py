"""Run code right after user code has imported a module, without importing the module for users who do not need it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call a function with a module as soon as the module is imported; at once if it is imported already.

    Args:
        name: Name of a top-level module.
        act: Function to call with the module, before the ``import`` statement of the user returns.
    """
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    """Finder that finds one module as Python's other finders do, and has `act` called after the module's import."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader that calls `act`; None for all other modules."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._act)
                return spec
        return None


class _Loader(Loader):
    """Loader that loads a module as the module's own loader does, and then calls `act`."""

    def __init__(self, loader: Any, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the module's own loader creates."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its own loader, and call `act`."""
        assert module.__spec__ is not None
        # The module gets its own loader back, because other code uses this loader, for example to read the module's
        # data files.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act(module)
