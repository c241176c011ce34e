"""Names of jobs and of their attempts."""

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
    """Of a JSON document, whatever the order of its keys."""
    return sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def job_id(framework: str, holder: str, fingerprint: str, key: str = "") -> str:
    """The id of a job that was not given one.

    A workflow engine asks for the same thing again after a restart, and has to find its job; somebody at a terminal who
    asks again means a new one.

    Args:
        framework: First part of the id, for the reader.
        holder: Who asks.
        fingerprint: Of its spec.
        key: Tells the tasks of one holder apart.
    """
    who_and_what = uuid4().hex if is_interactive(holder) else digest([holder, key, fingerprint])
    return f"{framework}-{who_and_what[:_DIGEST_LENGTH]}"


def is_interactive(holder: str) -> bool:
    """Whether a job is asked for by plain Python or the CLI: it ends with whoever waits for it."""
    return holder.startswith(_INTERACTIVE)


def is_legal(given: str) -> bool:
    """Whether a job can have this id."""
    return _JOB_ID.fullmatch(given) is not None


def checked(given: str) -> str:
    """A job id that was given; it becomes a part of paths and URLs.

    Raises:
        InvalidArgumentError: It is not fit for that.
    """
    if not is_legal(given):
        raise InvalidArgumentError(
            f'run_config.job_id "{given}" is not legal: 1 to 100 letters, digits, ".", "_" and "-", '
            "the first a letter or digit"
        )
    return given


def submission_id(job: str, attempt: int) -> str:
    """The id that Ray knows an attempt by; Ray accepts each only once, so every attempt has its own."""
    return f"{job}-{attempt}"
