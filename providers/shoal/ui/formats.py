"""Format times, sizes and numbers as text for the web page."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from shoal.training.reporting import Progress

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def duration(seconds: float | None) -> str:
    """Format a duration with at most two units, such as ``3 min 20 s`` or ``2 d 4 h``. Return an empty text for
    None."""
    if seconds is None:
        return ""
    left = max(0.0, seconds)
    if left < 10:
        return f"{left:.1f} s"
    for (unit, length), (smaller, part) in zip(_UNITS, (*_UNITS[1:], ("s", 1)), strict=True):
        if left >= length:
            count, rest = divmod(round(left), length)
            return f"{count} {unit}" + (f" {rest // part} {smaller}" if rest // part else "")
    return f"{left:.0f} s"


def iso(at: float) -> str:
    """Format a time, given in seconds since the epoch, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc(at: float) -> str:
    """Format a time in UTC, with seconds. The page's script converts the text to the browser's time zone."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(count: float | None) -> str:
    """Format a number of bytes with a unit, such as ``1.4 GiB``. Return an empty text for None."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def number(value: float | None) -> str:
    """Format a whole number with thousands separators, or another number with five significant digits. Return an empty
    text for None."""
    if value is None:
        return ""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.5g}"


def count(number_of: int, noun: str) -> str:
    """Format a count with its noun, such as ``1 node`` or ``3 nodes``."""
    return f"{number_of} {noun}" + ("" if number_of == 1 else "s")


def progress(progress: Progress) -> str:
    """Format the progress of a training, such as ``round 86 of 200``."""
    text = f"{progress.unit[:-1]} {number(progress.done)}"
    return text if progress.total is None else f"{text} of {number(progress.total)}"


def finite(value: float | None) -> float | None:
    """Return a value for a plot; None (a gap in the plot) for NaN and infinity, which JSON cannot contain."""
    return value if value is not None and math.isfinite(value) else None
