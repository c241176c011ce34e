"""Find the line numbers of DAGs, tasks and imports in a DAG file."""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path


class LineNumbers:
    """Line numbers in a Python file, which are looked up by the names of DAGs, tasks and modules."""

    def __init__(self, file: str) -> None:
        self._nodes: list[ast.AST] = []
        with suppress(SyntaxError, UnicodeDecodeError, OSError):
            self._nodes = list(ast.walk(ast.parse(Path(file).read_bytes())))

    def of_name(self, name: str) -> int | None:
        """Return the number of the first line that contains the name of a DAG or task, as a string or as the name of a
        function. If the name begins with task groups, as in ``group.task``, only ``task`` is looked up."""
        plain = name.rpartition(".")[2]
        for node in self._nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == plain:
                return node.lineno
            if isinstance(node, ast.Constant) and node.value == plain:
                return node.lineno
        return None

    def of_import(self, module: str) -> int | None:
        """Return the line of the first import of a module or of its submodules; None if the file itself has no such
        import."""
        for node in self._nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            if any(name.partition(".")[0] == module for name in names):
                return node.lineno
        return None
