"""Record which test files run the functions of each module, and name those of one module.

``python -m tests.reached --record PYTEST_ARGUMENTS``, then ``python -m tests.reached providers/shoal/FILE.py``.

Only lines within functions count, because the other lines run with the import, wherever that happens. The processes of
a pool and the drivers have an environment of their own and record nothing, so a test file that imports the module
counts too.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import coverage

_FOLDER = Path(__file__).parent
_RECORD = _FOLDER / "reached.json"
_SETTINGS = _FOLDER / "coverage.ini"
_ROOT = _FOLDER.parents[1]


def main(arguments: list[str]) -> int:
    """Print the test files of a module, or record; returns the exit status."""
    if arguments[0] == "--record":
        return record(arguments[1:])
    module = Path(arguments[0])
    if not module.is_file():
        raise SystemExit(f"There is no file {module}. Write its path from the root of the repository.")
    files = sorted({*_known().get(str(module), []), *_importing(module)})
    if not files:
        raise SystemExit(f"No test file imports {module}, and none that calls it is recorded: run `make reached`.")
    print(" ".join(file for file in files if (_ROOT / file).exists()))
    return 0


def record(arguments: list[str]) -> int:
    """Run pytest with these arguments, and add what it reached to what is recorded. Returns pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="shoal-reached-") as folder:
        data = Path(folder) / "data"
        command = ["coverage", "run", "--rcfile", _SETTINGS, "-m", "pytest", "-p", "tests.reached.recording"]
        every_process = {"COVERAGE_FILE": str(data), "COVERAGE_PROCESS_START": str(_SETTINGS)}
        ended = subprocess.run(
            [sys.executable, "-m", *command, *arguments], env=os.environ | every_process, check=False
        )
        known = _known()
        for module, tests in _reached(data).items():
            known[module] = sorted({*known.get(module, []), *tests})
    _RECORD.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    return ended.returncode


def _known() -> dict[str, list[str]]:
    return json.loads(_RECORD.read_text()) if _RECORD.exists() else {}


def _importing(module: Path) -> list[str]:
    package, name = re.sub(r"/__init__$", "", str(module.with_suffix("")).removeprefix("providers/")).rsplit("/", 1)
    dotted = re.escape(package.replace("/", "."))
    written = re.compile(rf"\b{dotted}\.{name}\b|^from {dotted} import .*\b{name}\b", re.MULTILINE)
    tests = (_ROOT / "tests").rglob("test_*.py")
    return [str(file.relative_to(_ROOT)) for file in tests if written.search(file.read_text())]


def _reached(data: Path) -> dict[str, set[str]]:
    measured = coverage.Coverage(data_file=str(data), config_file=str(_SETTINGS))
    measured.combine()
    found: dict[str, set[str]] = {}
    for file in measured.get_data().measured_files():
        inside = _lines_of_functions(Path(file))
        by_line = measured.get_data().contexts_by_lineno(file)
        contexts = {context for line, names in by_line.items() if line in inside for context in names}
        found[str(Path(file).relative_to(_ROOT))] = {name.partition("::")[0] for name in contexts if name}
    return found


def _lines_of_functions(file: Path) -> set[int]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, functions)]
    return {line for function in found for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
