"""Libraries that are imported when one of their names is first used: ``from shoal.lazy_imports import np, pa``.

Airflow loads DAG files again and again, and each of these libraries takes 0.1 to 5 s to import. Imports whose order or
thread matters (of XGBoost and LightGBM in workers, and of PyTorch), and those of an engine, stay inside functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["cloudpickle", "fs", "lightgbm", "mlflow", "np", "optuna", "pa", "pc", "pd", "pq", "ray", "sa", "xgboost"]


class LazyLibrary:
    """A library that is imported at the first access to one of its names.

    From then on both share one ``__dict__``. So a name costs what it costs in the module (33 ns against 30 ns, and
    79 ns with an ``import`` in the function), and a function that MLflow's autologging or a test replaces is replaced
    in both. Threads need no lock, because `import_module` waits for an import that another thread has begun. If the
    library is missing, each access raises `ModuleNotFoundError`.
    """

    __slots__ = ("__dict__", "_library")

    def __init__(self, library: str) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        module = import_module(self._library)
        self.__dict__ = module.__dict__
        return getattr(module, name)

    def __reduce__(self) -> tuple[type[LazyLibrary], tuple[str]]:
        return LazyLibrary, (self._library,)


if TYPE_CHECKING:
    import cloudpickle
    import lightgbm
    import mlflow
    import numpy as np
    import optuna
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import ray
    import sqlalchemy as sa
    import xgboost
    from pyarrow import fs
else:
    _MODULES = {
        "fs": "pyarrow.fs",
        "np": "numpy",
        "pa": "pyarrow",
        "pc": "pyarrow.compute",
        "pd": "pandas",
        "pq": "pyarrow.parquet",
        "sa": "sqlalchemy",
    }
    for _name in __all__:
        globals()[_name] = LazyLibrary(_MODULES.get(_name, _name))
