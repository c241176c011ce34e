"""Remove staged data: copies of in-memory data that were written for a job."""

from __future__ import annotations

from collections.abc import Iterable


def discard(locations: Iterable[str]) -> None:
    """Remove the directories or URIs of staged data; locations that no longer exist are ignored."""
    from shoal.data.staging.staged_data import discard as discard_one

    for location in locations:
        discard_one(location)
