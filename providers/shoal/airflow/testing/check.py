"""Check DAG files in a new Python process, and report the problems as text, as JSON, or for GitHub Actions."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from shoal.errors import InvalidArgumentError, MissingExtraError, ShoalError, shown
from shoal.os_processes import python_command


@dataclass(frozen=True)
class Finding:
    """One problem in a DAG file.

    Attributes:
        file: Path of the file, relative to the working folder if the file is below it.
        line: Line number; None if the problem concerns the whole file, or its line is not known.
        rule: The rule that is broken.
        message: What is wrong, and what to do.
        dag_id: Id of the DAG; None if the file could not be loaded, or the problem does not belong to a DAG.
    """

    file: str
    line: int | None
    rule: Rule
    message: str
    dag_id: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.rule}: {self.message}"

    def annotation(self) -> str:
        """Return the finding as a workflow command of GitHub Actions. GitHub then shows the message beside the line of
        the file."""
        where = {"file": self.file, "line": str(self.line or 1), "title": f"shoal {self.rule}"}
        properties = ",".join(f"{name}={_escaped(value, in_property=True)}" for name, value in where.items())
        return f"::error {properties}::{_escaped(self.message)}"


@dataclass(frozen=True)
class DagReport:
    """Result of a check of DAG files.

    Attributes:
        files: Paths of the files that were checked.
        dags: Ids of the DAGs that could be loaded.
        findings: The problems, ordered by file and line. Empty if there are no problems.
    """

    files: tuple[str, ...]
    dags: tuple[str, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        count = len(self.findings)
        files = f"{len(self.files)} DAG file{'s' * (len(self.files) != 1)}"
        total = f"{count} problem{'s' * (count != 1)} in {files}" if count else f"{files}, no problems"
        return "\n".join([*map(str, self.findings), total])

    def to_json(self) -> str:
        """Return the report as a JSON document."""
        return json.dumps(asdict(self), indent=2)

    def annotations(self) -> str:
        """Return the findings as workflow commands of GitHub Actions, one per line."""
        return "\n".join(finding.annotation() for finding in self.findings)


def _escaped(text: str, *, in_property: bool = False) -> str:
    escapes = {"%": "%25", "\r": "%0D", "\n": "%0A", **({":": "%3A", ",": "%2C"} if in_property else {})}
    return "".join(escapes.get(letter, letter) for letter in text)


IMPORT_BUDGET_S = 2.0
"""Default budget for loading a DAG file. Airflow's DAG processor loads every file every 30 s
(`min_file_process_interval`), and each task loads its file once more."""

HEAVY_MODULES = (
    "dask",
    "jax",
    "lightgbm",
    "mlflow",
    "pandas",
    "polars",
    "pyarrow",
    "pyspark",
    "ray",
    "scipy",
    "sklearn",
    "tensorflow",
    "torch",
    "transformers",
    "xgboost",
)
"""Libraries that take long to import, and that only tasks need."""


class Rule(StrEnum):
    """Rules that `check_dags` applies to DAG files. The argument `ignore` of `check_dags` takes values of this enum."""

    IMPORT_ERROR = "import-error"
    """Airflow cannot load the file."""
    WRONG_ARGUMENT = "wrong-argument"
    """An operator, spec or pool definition is not valid: as it is written, or with the default values of the params."""
    CYCLE = "cycle"
    """Tasks of a DAG wait for each other."""
    DUPLICATE_DAG = "duplicate-dag"
    """Two files define a DAG of the same id. Airflow shows only one of the two DAGs."""
    SLOW_IMPORT = "slow-import"
    """Loading the file takes longer than the budget. Airflow loads each file again and again."""
    HEAVY_IMPORT = "heavy-import"
    """Loading the file imports a library that only tasks need, such as pandas or torch."""
    NO_CLEANUP = "no-cleanup"
    """A task leases nodes or scales the pool for a run, and no task gives the nodes back if the run fails."""
    NO_LEASE = "no-lease"
    """A task trains or predicts on a pool, and no earlier task leases nodes of this pool."""
    UNKNOWN_CONNECTION = "unknown-connection"
    """A task uses an Airflow connection that does not exist."""
    USELESS_RETRIES = "useless-retries"
    """A task retries errors that every retry would meet again."""


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
