"""Record which jobs use staged data (copies of rows that were written for jobs), and remove staged data without
users."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.data import staged_data
from shoal.jobs.journal.attempts import Key


def claim(key: Key, locations: Iterable[str]) -> None:
    """Record in directories of staged data that an attempt uses the data, so that they are kept until the attempt
    ends."""
    for location in locations:
        staged_data.claim(location, key.submission_id)


def give_up(key: Key, locations: Iterable[str]) -> None:
    """Record in directories of staged data that an attempt has ended, and remove the directories that have no other
    user.

    Directories that no longer exist are ignored.
    """
    for location in locations:
        staged_data.unclaim(location, key.submission_id)
        staged_data.discard_unused(location)


def discard(locations: Iterable[str]) -> None:
    """Remove the directories of staged data to which an ended attempt has written the rows of its SQL queries."""
    for location in locations:
        staged_data.discard(location)
