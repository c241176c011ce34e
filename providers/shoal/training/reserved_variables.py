"""Refuse environment variables that a job may not set, because shoal, Ray or the node sets them."""

from __future__ import annotations

import re

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(RAY|SHOAL|TORCHELASTIC)_.*|PWD|PYTHONPATH|PYTHONHOME|PATH|LD_LIBRARY_PATH"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|CUDA_VISIBLE_DEVICES|MLFLOW_RUN_ID"
)
"""Environment variables that a job may not set: shoal, Ray or the node sets them, or they have no effect in a process
that is already running."""


def check_variable(name: str) -> None:
    """Check that a job may set an environment variable.

    Raises:
        ValueError: The name is not legal, or the variable is reserved.
    """
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f'"{name}" is not the name of an environment variable: use only letters, digits and "_"')
    if _RESERVED.fullmatch(name):
        raise ValueError(
            f"{name} cannot be set for a job: shoal, Ray or the node sets this variable, or the variable has no "
            f"effect in a process that is already running. Remove {name}. To make modules importable in the workers, "
            "use the options code and packages"
        )
