"""The page of 50 pools and 5,000 jobs: time to its first view, and reads of the store by 1 and by 50 viewers.

The time of a page is from the request to the last byte, with a reader that has read nothing yet. The reads are SELECTs
in 60 s in which one running job reports every 5 s, with viewers whose pages are all brought up to date.

Run it with ``python -m tests.benchmarks.ui_first_view``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.testclient import TestClient
from sqlalchemy import Engine, event

from shoal.state import Store
from shoal.state.schema import Job
from shoal.ui.access import Viewer
from shoal.ui.app import create_app
from shoal.ui.live import StoreReader
from shoal.ui.pages import Pages
from tests.benchmarks.report import table
from tests.support import ui_systems

_TURNS = 5
_SECONDS = 60
_PATHS = {"pools": "/", "jobs": "/jobs", "a pool": "/pools/pool-07", "a job": "/jobs/job-7"}
_PAGES = (("overview", ""), ("jobs", ""), ("pool", "pool-07"), ("job", "job-0"), ("models", ""))


class _Anyone:
    def viewer(self, request: Request) -> Viewer:
        return Viewer("benchmark", True, "none", may_end_some=lambda: True, may_end=lambda holder, team: True)


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_STATE_URL"] = f"sqlite:///{Path(folder) / 'state.db'}"
        store = Store()
        ui_systems.large(store)
        rows = [(name, *_milliseconds(path)) for name, path in _PATHS.items()]
        print(table(("50 pools, 5,000 jobs: page", "first view, ms", "next viewer, ms"), rows), end="\n\n")
        reads = {viewers: _reads(store, viewers) for viewers in (1, 50)}
        cells = [(f"{viewers}", f"{count}", f"{count / _SECONDS:.2f}") for viewers, count in reads.items()]
        print(table(("viewers", f"SELECTs in {_SECONDS} s", "per second"), cells))


def _milliseconds(path: str) -> tuple[str, str]:
    """Return the medians of a page's first view and of its view by a second viewer."""
    first, second = [], []
    for _ in range(_TURNS):
        with TestClient(create_app(access=_Anyone())) as client:
            for times in (first, second):
                began = time.perf_counter()
                assert client.get(path).status_code == 200
                times.append(1000 * (time.perf_counter() - began))
    return f"{statistics.median(first):.0f}", f"{statistics.median(second):.1f}"


def _reads(store: Store, viewers: int) -> int:
    now = [0.0]
    reader = StoreReader(store, monotonic=lambda: now[0])
    pages = Pages(reader, version="1", monotonic=lambda: now[0])
    viewer = _Anyone().viewer(Request({"type": "http"}))
    count = 0

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal count
        count += statement.lstrip().upper().startswith("SELECT")

    for second in range(_SECONDS):
        now[0] += 1.0
        if second % 5 == 0:
            with store.transaction() as session:
                session.get_one(Job, ("job-0", 1)).heartbeat_at = time.time()
        event.listen(Engine, "before_cursor_execute", note)
        for _ in range(viewers):
            for page, subject in _PAGES:
                pages.render(page, subject, {}, viewer=viewer, root="./", is_fragment=True)
        event.remove(Engine, "before_cursor_execute", note)
    return count


if __name__ == "__main__":
    main()
