"""Remove a staged copy of data when no connector or dataset spec in this process uses the copy any longer."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, Self

from shoal.data.staging.staged_data import discard, hand_over, release

log = logging.getLogger(__name__)

_kept: list[StagedCopy] = []

_WRITTEN, _SUBMITTED = "written as JSON", "submitted"


class StagedCopy:
    """Reference of this process to a staged copy of data: Parquet files that shoal wrote for the workers.

    The sources of connectors and the specs of datasets refer to this object. The copy is removed when the last of these
    sources and specs is deleted, or when the process exits. If a job still uses the copy, the copy is removed when the
    job ends. If a spec was written as JSON but not submitted, another process may submit the spec later. The copy is
    then kept until a job has used it.

    Args:
        location: Directory or URI of the copy.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._uses: set[str] = set()
        self._release = weakref.finalize(self, _release, location, os.getpid(), self._uses)

    def __eq__(self, other: object) -> bool:
        # pydantic compares two specs with this method, too. Specs with equal fields must be equal, even if only one of
        # them refers to a staged copy.
        return other is None or isinstance(other, StagedCopy)

    def __hash__(self) -> int:
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A pickled connector or spec contains None instead of this object, so that another process does not remove the
        # data.
        return type(None), ()

    def discard(self) -> bool:
        """Remove the staged copy of the data now; return False if the copy no longer existed."""
        self._release.detach()
        return discard(self.location)

    def written(self) -> None:
        """Record that a spec with this staged copy was written as JSON. The copy is then kept for the process that
        submits the spec."""
        self._uses.add(_WRITTEN)

    def submitted(self) -> None:
        """Record that this process has submitted a job with this staged copy. The copy is then removed when the job no
        longer uses it."""
        self._uses.add(_SUBMITTED)

    def keep(self) -> None:
        """Keep the staged copy of the data until this process exits."""
        _kept.append(self)


def _release(location: str, pid: int, uses: set[str]) -> None:
    # A forked child process also runs this finalizer, but only the process that created the StagedCopy may release the
    # data.
    if os.getpid() != pid:
        return
    try:
        if uses == {_WRITTEN}:
            hand_over(location)
        else:
            release(location)
    except Exception as error:
        log.warning("the staged data in %s could not be removed: %s", location, error)
