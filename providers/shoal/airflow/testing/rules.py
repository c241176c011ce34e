"""Define the rules for DAG files, the time limit for loading a file, and the libraries that files should not import."""

from __future__ import annotations

from enum import StrEnum

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
