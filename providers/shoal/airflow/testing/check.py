"""Check DAG files in a new Python process, in which no library is imported yet."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from shoal.airflow.testing.report import IMPORT_BUDGET_S, DagReport, Finding, Rule
from shoal.errors import InvalidArgumentError, MissingExtraError, ShoalError, shown
from shoal.os_processes import python_command

_MOST_LOGGED = 2000
"""Characters of the log that the error contains if the check itself fails."""


def check_dags(
    *paths: str | os.PathLike[str],
    import_budget_s: float = IMPORT_BUDGET_S,
    always_up: Collection[str] = (),
    connections: Collection[str] = (),
    ignore: Collection[str] = (),
) -> DagReport:
    """Check DAG files. Each file is loaded in a process of its own, as in Airflow's DAG processor.

    The check runs no task and contacts no pool. Connections are looked up where Airflow stores them: in environment
    variables ``AIRFLOW_CONN_...``, in the configured secrets backend and in Airflow's database, if there is one.

    Args:
        paths: DAG files, or folders with DAG files. ``.airflowignore`` is respected.
        import_budget_s: Seconds that loading a file may take, beyond the import of Airflow and of shoal's operators.
        always_up: Names of pools that are always up, so that training on them needs no lease.
        connections: Ids of connections that exist where the DAGs will run, but not here.
        ignore: Names of rules that are not checked (see `Rule`).

    Returns:
        The problems that were found, and the files that were checked.

    Raises:
        InvalidArgumentError: A path or rule does not exist, or there is no DAG file in a path.
        MissingExtraError: Airflow is not installed.
        ShoalError: The check itself failed.
    """
    for name in ignore:
        if name not in list(Rule):
            near = difflib.get_close_matches(str(name), list(Rule), n=1)
            hint = f"did you mean {near[0]}?" if near else f"the rules are {', '.join(Rule)}"
            raise InvalidArgumentError(f"ignore={shown(name)} is not the name of a rule: {hint}")
    if not paths:
        raise InvalidArgumentError("no path is given: pass a DAG file or a folder with DAG files")
    for path in paths:
        if not Path(path).exists():
            raise InvalidArgumentError(f"{path} does not exist: pass a DAG file or a folder with DAG files")
    if find_spec("airflow") is None:
        raise MissingExtraError("airflow", "airflow")
    request = {
        "paths": [str(Path(path).absolute()) for path in paths],
        "import_budget_s": import_budget_s,
        "always_up": list(always_up),
        "connections": list(connections),
    }
    # A process that a DAG file has started may live on and keep its output open, so the output is no pipe.
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        done = subprocess.run(
            python_command("-m", "shoal.airflow.testing.process"),
            input=json.dumps(request),
            stdout=output,
            stderr=errors,
            text=True,
            check=False,
        )
        output.seek(0)
        errors.seek(0)
        if done.returncode:
            raise ShoalError(f"the DAGs could not be checked:\n{errors.read()[-_MOST_LOGGED:].strip()}")
        answer = json.load(output)
    if missing := answer["without_files"]:
        raise InvalidArgumentError(
            f"{_shortened(missing[0])} contains no DAG file: Airflow loads only files that contain the words airflow "
            "and dag, and that .airflowignore does not exclude"
        )
    return DagReport(
        files=tuple(map(_shortened, answer["files"])),
        dags=tuple(answer["dags"]),
        findings=tuple(
            sorted(
                (
                    Finding(**{**found, "file": _shortened(found["file"]), "rule": Rule(found["rule"])})
                    for found in answer["findings"]
                    if found["rule"] not in ignore
                ),
                key=lambda one: (one.file, one.line or 0, one.rule, one.message),
            )
        ),
    )


def _shortened(path: str) -> str:
    """Return a path relative to the working folder if the path is inside this folder; otherwise return the path
    unchanged."""
    file, here = Path(path), Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else path
