"""Import libraries without optional packages such as scikit-learn, because importing these packages takes seconds."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

NOT_NEEDED = ("sklearn",)
"""Packages that XGBoost and LightGBM import if installed, for their scikit-learn estimators.

The import of scikit-learn takes three quarters of the libraries' import time (4 to 5 s of 6 s in each worker on a slow
machine with two cores). A training uses only boosters and does not need scikit-learn.
"""

_LIBRARIES = ("xgboost", "lightgbm")

_VARIABLES_BEFORE_FORKS = {
    # Without this setting, NumPy's OpenBLAS would start a thread for each CPU.
    "OPENBLAS_NUM_THREADS": "1",
    # Without this setting, Arrow's jemalloc would start a thread that frees memory.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # The workers, which may be forks of this process, must return freed memory to the operating system. Of Arrow's
    # allocators, only "system" (malloc) does this.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # Without this setting, MLflow would start a thread that sends data about users' trainings to MLflow's developers.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables for imports in a process that forks other processes later."""

_lean: set[str] = set()
"""Modules of this process that are incomplete, because they were imported while packages were hidden."""


def import_lean(modules: Iterable[str], absent: Iterable[str] = NOT_NEEDED) -> None:
    """Import modules, but not their slow optional packages that shoal does not need.

    During the import, the optional packages are hidden: the modules behave as if these packages were not installed.
    This function is therefore only for shoal's own processes. Packages that are already imported are not hidden. After
    this call, the hidden packages can be imported normally.
    """
    hidden = [name for name in absent if name not in sys.modules]
    # An entry None in sys.modules hides a package: an import of the package then fails as if the package were not
    # installed.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        for module in modules:
            is_new = module not in sys.modules
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
                if is_new and hidden:
                    _lean.add(module)
    finally:
        for name in hidden:
            del sys.modules[name]


def forget_lean() -> None:
    """Remove from this process the libraries that `import_lean` has imported, so that the next import of such a library
    also imports its optional packages. Modules of shoal that contain parts of the libraries are removed, too."""
    if not _lean:
        return
    libraries = {*_LIBRARIES, *(name.split(".")[0] for name in _lean)} - {"shoal"}
    shoal = tuple(f"shoal.training.{library}." for library in _LIBRARIES)
    for module in [name for name in sys.modules if name.split(".")[0] in libraries or name.startswith(shoal)]:
        del sys.modules[module]
    _lean.clear()


def add_estimators(library: str) -> None:
    """Import the scikit-learn estimators of a library that `import_lean` has imported without them.

    Only the modules of the estimators are imported again, so that existing boosters keep their classes.
    """
    compat = importlib.import_module(f"{library}.compat")
    if compat.SKLEARN_INSTALLED or importlib.util.find_spec("sklearn") is None:
        return
    importlib.reload(compat)
    estimators = importlib.reload(importlib.import_module(f"{library}.sklearn"))
    package = importlib.import_module(library)
    for name in set(package.__all__) & set(vars(estimators)):
        if getattr(estimators, name).__module__ == estimators.__name__:
            setattr(package, name, getattr(estimators, name))


@contextlib.contextmanager
def before_forks() -> Iterator[None]:
    """Set environment variables for the imports in the ``with`` block, so that these imports start no threads.

    A process that forks other processes later must have only one thread, because a fork copies only one thread: a lock
    that another thread holds would never be released in the fork.
    """
    variables = dict(os.environ)
    os.environ.update(_VARIABLES_BEFORE_FORKS)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)


def thread_count() -> int:
    """Return the number of threads of this process, including those of C libraries."""
    return len(os.listdir("/proc/self/task"))


CODE = "shoal_code"
"""Name of the folder with the job's own code."""

PACKAGES = "shoal_packages"
"""Name of the folder with the packages that were installed for the job."""

HOOK = f"{__name__}.add_to_path"
"""Full name of :func:`add_to_path`, for Ray's option ``worker_process_setup_hook``."""


def add_to_path() -> None:
    """Put the job's folders in front of `sys.path`; Ray calls this function when a worker of the job starts.

    Ray unpacks each of these folders inside another folder, and adds only the outer folder to `sys.path`. PYTHONPATH is
    set, too, so that programs that the worker starts find the modules.
    """
    found = [str(Path(outer, name)) for name in (CODE, PACKAGES) for outer in sys.path if Path(outer, name).is_dir()]
    sys.path[:0] = found
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH")])])
