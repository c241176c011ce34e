"""Import libraries without optional packages such as scikit-learn, because importing these packages takes seconds."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.boosting_libraries import BOOSTING_LIBRARIES

NOT_NEEDED = ("sklearn",)
"""Packages that XGBoost and LightGBM import if installed, for their scikit-learn estimators.

The import of scikit-learn takes three quarters of the libraries' import time (4 to 5 s of 6 s in each worker on a slow
machine with two cores). A training uses only boosters and does not need scikit-learn.
"""


def short_spins() -> dict[str, str]:
    """Return the variable with which the threads of GNU's OpenMP keep their CPUs for some microseconds while they wait
    for each other, then sleep; nothing if the user has set how they wait.

    By default they keep them for milliseconds, also if other processes need these. Measured with two threads on two
    CPUs: as fast as by default if these are idle. Beside two busy processes: XGBoost 0.5 s, by default 13.1; LightGBM
    4.3 s, by default 25.8. Threads that sleep at once (``OMP_WAIT_POLICY``) are slower on idle CPUs: 1.3 times with
    XGBoost, 2 times with LightGBM.
    """
    is_set = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    return {} if is_set else {"GOMP_SPINCOUNT": "10000"}


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


def import_lean(modules: Iterable[str], *, complete: bool = False) -> None:
    """Import modules, but not their slow optional packages that shoal does not need.

    During the import, the optional packages are hidden: the modules behave as if these packages were not installed.
    This function is therefore only for shoal's own processes. Packages that are already imported are not hidden. After
    this call, the hidden packages can be imported normally.

    Args:
        modules: Names of the modules.
        complete: Whether to import the optional packages, too, because user code runs in this process.
    """
    if complete:
        complete_libraries()
    with hidden(() if complete else NOT_NEEDED):
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


@contextlib.contextmanager
def hidden(packages: Iterable[str]) -> Iterator[None]:
    """Let imports of packages fail in the ``with`` block as if the packages were not installed. Packages that are
    imported already are not hidden."""
    names = [name for name in packages if name not in sys.modules]
    # An entry None in sys.modules has this effect.
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def complete_libraries() -> None:
    """Let user code in this process find the libraries as if `import_lean` had not imported them.

    A library that nothing has used yet is removed, so that only its next import, if there is one, takes the time for
    its optional packages. Otherwise objects of its classes may live, and its estimators are added.
    """
    for library in BOOSTING_LIBRARIES:
        if library in sys.modules and _lacks_estimators(library):
            if _is_used(library):
                add_estimators(library)
            else:
                for module in _modules_of(library):
                    del sys.modules[module]


def add_estimators(library: str) -> None:
    """Import the scikit-learn estimators of a library that `import_lean` has imported without them.

    Only the modules of the estimators are executed again, so that existing boosters keep their classes.
    """
    importlib.import_module(library)
    if not _lacks_estimators(library):
        return
    for name in BOOSTING_LIBRARIES[library].with_scikit:
        if module := sys.modules.get(f"{library}.{name}"):
            before = dict(vars(module))
            importlib.reload(module)
            changed = {each: old for each, old in before.items() if vars(module)[each] is not old}
            for other in (vars(sys.modules[each]) for each in _modules_of(library)):
                same = {each for each, old in changed.items() if each in other and other[each] is old}
                other.update({each: vars(module)[each] for each in same})


def _lacks_estimators(library: str) -> bool:
    modules = BOOSTING_LIBRARIES[library].with_scikit
    if not modules:
        return False
    compat = importlib.import_module(f"{library}.{modules[0]}")
    return not compat.SKLEARN_INSTALLED and importlib.util.find_spec("sklearn") is not None


def _modules_of(library: str) -> list[str]:
    return [name for name in list(sys.modules) if name.partition(".")[0] == library]


def _is_used(library: str) -> bool:
    """Return whether a module outside of a library contains a module, class or function of the library."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == library or not issubclass(type(module), types.ModuleType):
            continue
        # Other ways to look at a lazy module or an object may import a module.
        for value in list(object.__getattribute__(module, "__dict__").values()):
            kind = type(value)
            if kind is types.ModuleType:
                origin = value.__name__
            elif kind is types.FunctionType or issubclass(kind, type):
                origin = value.__module__
            else:
                continue
            if str(origin).partition(".")[0] == library:
                return True
    return False


@contextlib.contextmanager
def before_forks() -> Iterator[None]:
    """Set environment variables for the imports in the ``with`` block, so that these imports start no threads.

    A process that forks other processes later must have only one thread, because a fork copies only one thread: a lock
    that another thread holds would never be released in the fork.
    """
    variables = dict(os.environ)
    os.environ.update(_VARIABLES_BEFORE_FORKS | short_spins())
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
