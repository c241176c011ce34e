"""Register the boosting libraries. A new one is its folder in `shoal.training`, a line here, and an extra."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple


class Registered(NamedTuple):
    """What the package knows of a boosting library without its folder.

    Args:
        title: Name of the library in texts.
        home: Module and class of its `shoal.training.boosting.library.Library`.
        distributions: Names under which PyPI has it.
        estimator: Class of `shoal.distributors` that trains with it.
        with_scikit: Modules of the package that import scikit-learn if it is installed, in the order of their imports;
            the first one says in SKLEARN_INSTALLED whether it was. Empty if no module has this choice.
    """

    title: str
    home: str
    distributions: tuple[str, ...]
    estimator: str
    with_scikit: tuple[str, ...] = ()


_WITH_SCIKIT = ("compat", "sklearn", "dask")


BOOSTING_LIBRARIES = {
    "xgboost": Registered(
        "XGBoost", "shoal.training.xgboost.library:XGBoost", ("xgboost", "xgboost-cpu"), "XGBEstimator", _WITH_SCIKIT
    ),
    "lightgbm": Registered(
        "LightGBM", "shoal.training.lightgbm.library:LightGBM", ("lightgbm",), "LightGBMEstimator", _WITH_SCIKIT
    ),
}
"""The libraries, by the name of their package and their extra."""

MLFLOW_STORE = "mlflow.store"
"""Name, among the libraries that a driver imports, of MLflow's modules for its databases."""

if TYPE_CHECKING:
    Framework = Literal["xgboost", "lightgbm"]
else:
    Framework = Literal[*BOOSTING_LIBRARIES]


@functools.cache
def loaded(framework: str) -> Any:
    """Return a library's `Library` object, without an import of the library itself.

    Where `shoal.training.boosting.library` can be imported, `library_of` returns it with its type.
    """
    module, _, name = BOOSTING_LIBRARIES[framework].home.partition(":")
    return getattr(import_module(module), name)()
