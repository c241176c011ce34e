"""Call a function right after user code has imported a module, without importing the module in advance."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call a function as soon as a module is imported, or at once if the module is already imported."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    """Entry of ``sys.meta_path`` for one module. Python's other finders find the module, and this finder makes sure
    that `act` is called after the import."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that calls `act`; return None for all other modules."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._act)
                return spec
        return None


class _Loader(Loader):
    """Loader that loads a module with the module's own loader, and then calls `act`."""

    def __init__(self, loader: Any, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the module's own loader creates."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the module's own loader, and then call `act` with the module."""
        assert module.__spec__ is not None
        # The module's own loader is restored, because other code uses this loader, for example to read the module's
        # data files.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act(module)
