"""Format times, sizes and numbers as text for the web page, and link holders to their runs."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime

from shoal.links import Link, dag_run_link, flow_run_link, task_link
from shoal.pool.holder import DagRunHolder, run_of
from shoal.state import Store, deployments
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


class RunLinks:
    """The addresses of all Airflow deployments, read from the store once."""

    def __init__(self, store: Store) -> None:
        self._base_urls = deployments.base_urls(store)

    def link(self, holder: str, task_key: str | None = None) -> Link | None:
        """Return the link to the run whose name is `holder`, or to the run's task instance. None if the holder is no
        run, or if the address of Airflow or Prefect is not known."""
        if (run := DagRunHolder.of(holder)) is not None:
            # A name without a deployment is from an older shoal. Only the Airflow of this process is known then.
            base_url = (
                os.environ.get("AIRFLOW__API__BASE_URL")
                if run.deployment is None
                else self._base_urls.get(run.deployment)
            )
            task_id, _, index = (task_key or "").rpartition("/")
            task = task_link(base_url, run.dag_id, run.run_id, task_id, int(index)) if task_id else None
            return task or dag_run_link(base_url, run.dag_id, run.run_id)
        kind, _, name = run_of(holder).partition(":")
        return flow_run_link(name) if kind == "prefect" else None
