"""Add the folders with a job's own code and packages to `sys.path` in the workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
