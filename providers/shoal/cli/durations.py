"""Parse durations on the command line, such as `90d`."""

from __future__ import annotations

import re
from datetime import timedelta

from shoal.errors import InvalidArgumentError, shown

_DURATION = re.compile(r"(\d{1,6})\s*([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}


def duration(text: str) -> timedelta:
    """Parse a whole number of hours, days or weeks: `36h`, `90d`, `4w`.

    Raises:
        InvalidArgumentError: The text is not a duration of this form.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidArgumentError(
            f"{shown(text)} is not a duration: write hours, days or weeks, such as 36h, 90d or 4w"
        )
    return timedelta(hours=int(found[1]) * _HOURS[found[2]])
