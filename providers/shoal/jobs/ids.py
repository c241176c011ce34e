"""Build and check the ids of jobs and of their attempts."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any
from uuid import uuid4

from shoal.errors import InvalidArgumentError

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DIGEST_LENGTH = 12  # 48 bits: two of a million jobs share an id with a chance of one in 500
_INTERACTIVE = ("cli:", "python:")


def digest(document: Any) -> str:
    """Return the SHA-256 of a JSON document as hexadecimal text; the order of keys does not matter."""
    return sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def job_id(framework: str, holder: str, fingerprint: str, key: str = "") -> str:
    """Build the id of a job whose spec has no `job_id`.

    A workflow engine gets the same id for the same spec, so that it finds its job again after a restart. A user of the
    CLI or of plain Python gets a new id with every call.

    Args:
        framework: First part of the id, for readability.
        holder: Name of the run that submits the job.
        fingerprint: Fingerprint of the job's spec.
        key: Distinguishes the tasks of one holder.
    """
    suffix = uuid4().hex if is_interactive(holder) else digest([holder, key, fingerprint])
    return f"{framework}-{suffix[:_DIGEST_LENGTH]}"


def is_interactive(holder: str) -> bool:
    """Return whether plain Python or the CLI submitted the job: Ctrl-C in the waiting process cancels such a job."""
    return holder.startswith(_INTERACTIVE)


def is_legal(given: str) -> bool:
    """Return whether a text is a legal job id."""
    return _JOB_ID.fullmatch(given) is not None


def checked(given: str) -> str:
    """Return a job id from the user after checking that it can be a part of paths and URLs.

    Raises:
        InvalidArgumentError: The id is not legal.
    """
    if not is_legal(given):
        raise InvalidArgumentError(
            f'run_config.job_id "{given}" is not legal: use 1 to 100 letters, digits, ".", "_" and "-", '
            "and begin with a letter or a digit"
        )
    return given


def submission_id(job: str, attempt: int) -> str:
    """Return the id of an attempt in Ray, which accepts each submission id only once."""
    return f"{job}-{attempt}"
