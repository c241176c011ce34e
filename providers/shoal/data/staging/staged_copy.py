"""Remove a staged copy of data when the last connector or spec of this process that uses the copy is gone."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any, Self

from shoal.data.staging.staged_data import discard, release

log = logging.getLogger(__name__)

_kept: list[StagedCopy] = []


class StagedCopy:
    """A staged copy of data that this process holds.

    The sources of connectors and the specs of datasets refer to this object. When the last of them is gone, at the
    latest when the process exits, the copy is removed. If a job uses it then, the end of the job removes it.

    Args:
        location: Directory or URI of the copy.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._release = weakref.finalize(self, _release, location, os.getpid())

    def __eq__(self, other: object) -> bool:
        # Specs with equal fields are equal, whether or not this process holds the staged copy that they name.
        return other is None or isinstance(other, StagedCopy)

    def __hash__(self) -> int:
        return 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Only this process holds the data. So a pickled connector or spec contains None instead of this object.
        return type(None), ()

    def discard(self) -> bool:
        """Remove the copy now. Return False if it did not exist any more."""
        self._release.detach()
        return discard(self.location)

    def keep(self) -> None:
        """Keep the copy until this process exits."""
        _kept.append(self)


def _release(location: str, pid: int) -> None:
    # A forked child process inherits this function as a finalizer, but only the process that made the StagedCopy may
    # release the data.
    if os.getpid() != pid:
        return
    try:
        release(location)
    except Exception as error:
        log.warning("the staged data in %s could not be removed: %s", location, error)
