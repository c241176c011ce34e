"""Build and check the ids of jobs and of their attempts."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any
from uuid import uuid4

from shoal.errors import InvalidArgumentError

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED = frozenset({"model", "checkpoints", "staging"})
"""Names of folders in an artifact location that belong to several jobs."""
_DIGEST_LENGTH = 12  # with 48 bits, the probability that any two of a million jobs get the same id is 1 in 500


def digest(document: Any) -> str:
    """Return the SHA-256 of a JSON document as hexadecimal text; the order of keys does not matter."""
    return sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def job_id(framework: str, holder: str, fingerprint: str, key: str = "") -> str:
    """Build the id of a job whose spec has no `job_id`.

    For a run of a workflow engine, the same spec always gives the same id, so that the engine finds its job again after
    a restart. For the CLI and plain Python, every call gives a new id.
    """
    if is_interactive(holder):
        return new_job_id(framework)
    return f"{framework}-{digest([holder, key, fingerprint])[:_DIGEST_LENGTH]}"


def new_job_id(framework: str) -> str:
    """Build a job id that no earlier submission has used: the framework's name and random digits."""
    return f"{framework}-{uuid4().hex[:_DIGEST_LENGTH]}"


def is_interactive(holder: str) -> bool:
    """Return whether a job was submitted by plain Python or the CLI, and not by a run of a workflow engine.

    If the result is True, Ctrl-C in the process that waits for the job cancels the job.
    """
    return holder.startswith(("cli:", "python:"))


def is_legal(given: str) -> bool:
    """Return whether a text is a legal job id, which has 1 to 100 letters, digits, ".", "_" and "-"."""
    return _JOB_ID.fullmatch(given) is not None


def checked(given: str) -> str:
    """Check that a job id from the user can be a part of paths and URLs, and return the id."""
    if not is_legal(given):
        raise InvalidArgumentError(
            f'run_config.job_id "{given}" is not legal: use 1 to 100 letters, digits, ".", "_" and "-", '
            "and begin with a letter or a digit"
        )
    if given in _RESERVED:
        raise InvalidArgumentError(f'run_config.job_id "{given}" is the name of a folder of shoal: choose another id')
    return given
