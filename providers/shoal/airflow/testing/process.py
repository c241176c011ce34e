"""Process in which DAG files are checked. The process imports Airflow once, and loads each file in a fork of itself.

Airflow's DAG processor also loads each DAG file in a fork. Because of the fork, the measured time and imports of a file
do not depend on other files, and a file that ends its process does not end the check. The process reads its request
from stdin, and writes its answer to stdout.
"""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.airflow.testing.check import HEAVY_MODULES, Rule
from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.os_processes import how_ended
from shoal.training.host.imports import import_lean
from shoal.training.host.own_process import ending_forks
from shoal.training.host.process_channel import ProcessChannel

_IMPORTED_BEFORE = (
    "airflow.dag_processing.dagbag",
    "airflow.sdk",
    "airflow.providers.standard.operators.python",
    "airflow.providers.standard.operators.empty",
    "shoal.airflow.pool_for_run",
    "shoal.airflow.task_decorators",
    "shoal.airflow.notifications",
    "shoal.airflow.testing.dag_problems",
    "shoal.kinds.task_spec",
)
"""Modules that are imported before the DAG files are loaded, so that their import is not counted as work of a file."""

_SETTINGS = {
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    # The line number of an error is read from its traceback. Without these settings, Airflow shortens the traceback to
    # two frames.
    "AIRFLOW__CORE__DAGBAG_IMPORT_ERROR_TRACEBACKS": "True",
    "AIRFLOW__CORE__DAGBAG_IMPORT_ERROR_TRACEBACK_DEPTH": "50",
}

_Facts = dict[str, Any]


def main() -> None:
    """Read the request from stdin, check the DAG files, and write the answer to stdout."""
    request = json.load(sys.stdin)
    # Airflow and the DAG files may print to stdout. Such output is sent to stderr, so that stdout has only the answer.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        os.environ.update(_SETTINGS)
        for module in _IMPORTED_BEFORE:
            import_module(module)
        json.dump(check(request), answer)


def check(request: Mapping[str, Any]) -> _Facts:
    """Check the DAG files that a request names."""
    from airflow.configuration import conf
    from airflow.utils.file import list_py_file_paths, might_contain_dag

    safe_mode = conf.getboolean("core", "DAG_DISCOVERY_SAFE_MODE", fallback=True)
    found = {
        path: [str(file) for file in sorted(list_py_file_paths(path, safe_mode)) if might_contain_dag(file, safe_mode)]
        for path in request["paths"]
    }
    files = list(dict.fromkeys(file for some in found.values() for file in some))
    for path in request["paths"]:
        # Airflow puts the folder of a DAG bundle on the import path, so that the files of the folder can import each
        # other.
        sys.path.append(path if os.path.isdir(path) else os.path.dirname(path))
    findings: list[_Facts] = []
    first_file: dict[str, str] = {}
    wrong = cache(wrong_connection)
    pools: dict[str | None, tuple[str | None, str]] = {}
    files_with_pools = []
    for file in files:
        facts = _in_fork(file, request)
        findings += facts["findings"]
        for dag_id, line in facts["dags"].items():
            other = first_file.setdefault(dag_id, file)
            if other != file:
                message = f"the DAG {dag_id} is also defined in {Path(other).name}: give one of them another dag_id"
                findings.append(_finding(file, line, Rule.DUPLICATE_DAG, message, dag_id))
        if facts["pools"]:
            files_with_pools.append(file)
        for pool in facts["pools"]:
            here = f"{pool['uri']} in task {pool['task_id']} of {Path(file).name}"
            uri, there = pools.setdefault(pool["name"], (pool["uri"], here))
            if uri != pool["uri"]:
                message = f"the pool {pool['name']} is {here}, but {there}: write one URI, or name them differently"
                findings.append(_finding(file, pool["line"], Rule.WRONG_ARGUMENT, message, pool["dag_id"]))
        for use in facts["connections"]:
            conn_id = use["conn_id"]
            if conn_id in request["connections"]:
                continue
            if (problem := wrong(conn_id, of_pool=use["of_pool"])) is not None:
                rule = Rule.UNKNOWN_CONNECTION if problem.startswith("uses") else Rule.WRONG_ARGUMENT
                findings.append(_finding(file, use["line"], rule, f"task {use['task_id']} {problem}", use["dag_id"]))
    # Where the libraries are imported, they check the parameters of each training that is loaded. The files were loaded
    # without them first, to find the heavy imports.
    import_lean(BOOSTING_LIBRARIES)
    for file in files_with_pools:
        findings += [found for found in _in_fork(file, request)["findings"] if found["rule"] == Rule.WRONG_ARGUMENT]
    return {
        "files": files,
        "dags": sorted(first_file),
        "findings": [one for number, one in enumerate(findings) if one not in findings[:number]],
        "without_files": [path for path, some in found.items() if not some],
    }


def _in_fork(file: str, request: Mapping[str, Any]) -> _Facts:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            try:
                with ending_forks():
                    facts = _facts(file, request["import_budget_s"], request["always_up"])
            except Exception:
                facts = {"error": traceback.format_exc()}
            ProcessChannel(theirs).send(json.dumps(facts).encode())
        finally:
            os._exit(0)
    theirs.close()
    text = b""
    with ProcessChannel(ours, child) as channel, suppress(EOFError):
        text = channel.receive()
    _, status = os.waitpid(child, 0)
    if not text:
        message = f"the process that loaded the file {how_ended(os.waitstatus_to_exitcode(status))}"
        findings = [_finding(file, None, Rule.IMPORT_ERROR, message)]
        return {"dags": {}, "connections": [], "pools": [], "findings": findings}
    facts = json.loads(text)
    if "error" in facts:
        raise RuntimeError(f"{file} could not be checked:\n{facts['error']}")
    return dict(facts)


def _facts(file: str, import_budget_s: float, always_up: Collection[str]) -> _Facts:
    """Load a DAG file, and return its findings, the line numbers of its DAGs, and the connections that its tasks
    use."""
    from airflow.dag_processing.dagbag import DagBag

    from shoal.airflow.operators.base import Arguments, PoolOperator, arguments_of, check_pool, is_a
    from shoal.airflow.testing.dag_problems import connections, problems

    before = set(sys.modules)
    started = time.monotonic()
    bag: Any = DagBag(dag_folder=file, collect_dags=False)
    bag.process_file(file)
    took = time.monotonic() - started

    lines = LineNumbers(file)
    findings = [_import_error(file, text) for text in bag.import_errors.values()]
    if heavy := [module for module in HEAVY_MODULES if module in sys.modules.keys() - before]:
        message = f"loading the file imports {', '.join(heavy)}: import it in the function of the task that uses it"
        line = next(filter(None, map(lines.of_import, heavy)), None)
        findings.append(_finding(file, line, Rule.HEAVY_IMPORT, message))
    if took > import_budget_s:
        message = (
            f"loading the file took {took:.1f} s, and the budget is {import_budget_s:g} s: move work such as queries "
            "and slow imports into tasks"
        )
        findings.append(_finding(file, None, Rule.SLOW_IMPORT, message))
    uses: list[_Facts] = []
    pools: dict[str | None, _Facts] = {}
    for dag in bag.dags.values():
        for rule, message, task_id in problems(dag, always_up):
            line = lines.of_name(task_id) or lines.of_name(dag.dag_id)
            findings.append(_finding(file, line, rule, message, dag.dag_id))
        for task in dag.tasks:
            line = lines.of_name(task.task_id) or lines.of_name(dag.dag_id)
            place = {"dag_id": dag.dag_id, "task_id": task.task_id, "line": line}
            for conn_id, of_pool in connections(task):
                uses.append({"conn_id": conn_id, "of_pool": of_pool, **place})
            if is_a(task, PoolOperator):
                spec = check_pool(Arguments(arguments_of(task)))
                name, uri = (spec.name, spec.uri) if spec else (None, None)
                pools.setdefault(uri, {"name": name, "uri": uri, **place})
    dags = {one: lines.of_name(one) for one in bag.dags}
    return {"dags": dags, "findings": findings, "connections": uses, "pools": [*pools.values()]}


def _finding(file: str, line: int | None, rule: Rule, message: str, dag_id: str | None = None) -> _Facts:
    return {"file": file, "line": line, "rule": rule, "message": message, "dag_id": dag_id}


_FRAME = re.compile(r'^ *File "(?P<file>.+?)", line (?P<line>\d+)', re.MULTILINE)


def _import_error(file: str, text: str) -> _Facts:
    """Return the finding about a file that Airflow cannot load."""
    frames = list(_FRAME.finditer(text))
    own = [int(frame["line"]) for frame in frames if frame["file"] == file]
    # The last frame of the traceback is followed by its indented source lines, and then by the exception.
    rest = text[frames[-1].end() :].splitlines()[1:] if frames else text.splitlines()
    while frames and rest and (not rest[0] or rest[0].startswith(" ")):
        rest.pop(0)
    message = "\n".join(rest).strip() or text.strip()
    kind = message.partition(":")[0].rpartition(".")[2]
    if kind == "InvalidArgumentError":
        return _finding(file, own[-1] if own else None, Rule.WRONG_ARGUMENT, message.partition(": ")[2])
    rule = Rule.CYCLE if "Cycle detected" in message else Rule.IMPORT_ERROR
    return _finding(file, own[-1] if own else None, rule, message)


class LineNumbers:
    """Line numbers in a Python file, which are looked up by the names of DAGs, tasks and modules."""

    def __init__(self, file: str) -> None:
        self._names: dict[str, int] = {}
        self._imports: dict[str, int] = {}
        nodes: Iterable[ast.AST] = ()
        with suppress(SyntaxError, UnicodeDecodeError, OSError):
            nodes = ast.walk(ast.parse(Path(file).read_bytes()))
        for node in nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Constant(value=str(name)):
                    self._names.setdefault(name, node.lineno)
                case ast.ImportFrom(module=str(module)):
                    self._imports.setdefault(module.partition(".")[0], node.lineno)
                case ast.Import(names=modules):
                    for each in modules:
                        self._imports.setdefault(each.name.partition(".")[0], node.lineno)

    def of_name(self, name: str) -> int | None:
        """Return the number of the first line that contains the name of a DAG or task, as a string or as the name of a
        function. If the name begins with task groups, as in ``group.task``, only ``task`` is looked up."""
        return self._names.get(name.rpartition(".")[2])

    def of_import(self, module: str) -> int | None:
        """Return the line of the first import of a module or of its submodules; None if the file itself has no such
        import."""
        return self._imports.get(module)


def wrong_connection(conn_id: str, *, of_pool: bool) -> str | None:
    """Return a text about what is wrong with a connection: it does not exist or, if `of_pool` is True, it does not
    define a pool. None if nothing is wrong."""
    from airflow.secrets.metastore import MetastoreBackend

    from shoal.airflow.hooks import ComputePoolHook, spec_of
    from shoal.errors import InvalidArgumentError

    connection: Any = None
    # The connection does not exist, or the secrets backend cannot be reached. A test environment may have no database.
    with suppress(Exception):
        connection = ComputePoolHook.get_connection(conn_id)
    if connection is None:
        with suppress(Exception):
            connection = MetastoreBackend().get_connection(conn_id)
    if connection is None:
        return (
            f'uses the connection "{conn_id}", which Airflow does not find here: define it as '
            f"AIRFLOW_CONN_{conn_id.upper()}, or name it with --connection (connections=) if it exists "
            "where the DAG runs"
        )
    if of_pool:
        try:
            spec_of(connection, keep=False)
        except InvalidArgumentError as error:
            return f"has a wrong connection: {error}"
    return None


if __name__ == "__main__":
    main()
