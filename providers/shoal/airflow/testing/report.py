"""Report of a check of DAG files. The report can be printed as text, as JSON, or for GitHub Actions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


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

    def to_dict(self) -> Mapping[str, Any]:
        """Return the report as plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the report as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

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
