"""Names of a package that are imported only when they are first used.

Airflow loads DAG files again and again, so that an import of shoal must be fast, and a DAG file needs few modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its names under ``if TYPE_CHECKING:``, as type checkers
    read them. So a name and its module stand in the package only once, also without an `__all__`."""

    def get(name: str) -> Any:
        if name == "__all__":
            return [*_modules(package)]
        if (module := _modules(package).get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module), name)

    return get


@cache
def _modules(package: str) -> dict[str, str]:
    """Return the module of each name that a package imports under ``if TYPE_CHECKING:``, read from its source."""
    import ast  # here, because both imports take longer than all others of `import shoal`
    import pkgutil

    source = pkgutil.get_data(package, "__init__.py") or b""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {name.name: str(node.module) for node in imports for name in node.names}
