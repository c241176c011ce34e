"""The plot "Size against demand": the rows of the store, whoever has looked at the page, and gaps where nothing is
known. The nodes are tiny and real, and the clock is a fake."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, select

from shoal.pool.api import ComputePool
from shoal.pool.backends.interface import Seen
from shoal.pool.journal import rows, sizes
from shoal.pool.reconciling import reconcile, sweep
from shoal.pool.scaling_plan import should_note_size
from shoal.state import Store
from shoal.state.schema import Pool, Size
from shoal.state.stamps import shared_now
from shoal.ui.live import StoreReader
from shoal.ui.pages import Pages
from tests.support import clocks
from tests.support.tiny_backend import TinyBackend
from tests.support.waiting import wait_until

MINUTE = 60.0
VIEWER: Any = SimpleNamespace(may_act=False, may_end_some=lambda: False)


@pytest.fixture
def clock(monkeypatch):
    return clocks.installed(monkeypatch)


def server(clock: Callable[[], float]) -> Pages:
    """The pages of a server that begins now."""
    return Pages(StoreReader(Store(), clock=clock), "1", clock=clock)


def plot_of(server: Pages) -> dict[str, Any]:
    page = server.render("pool", "sized", {}, viewer=VIEWER, root="./", is_fragment=True)
    found = re.search('data-plot="([^"]+)"', page)
    return json.loads(unescape(found[1]))


def drawn_at(plot: dict[str, Any], at: float) -> tuple[int | None, int | None] | None:
    """The ready and the demanded nodes that the plot draws for a time; None before its beginning and after its end."""
    times = [datetime.fromisoformat(each).timestamp() for each in plot["ready"]["x"]]
    at = int(at)  # the times of a plot have whole seconds
    if not times[0] <= at <= times[-1]:
        return None
    last = max(number for number, time in enumerate(times) if time <= at)
    return plot["ready"]["y"][last], plot["target"]["y"][last]


def test_an_hour_without_viewers_is_drawn_as_it_was_and_the_same_by_every_server(tiny, clock):
    begun = clock()
    pool = ComputePool("local://sized?max_nodes=4&idle_timeout=none", clock=clock).up()
    shown_at = [begun]
    looked = server(lambda: shown_at[0])

    def pass_minutes(first: int, last: int) -> None:
        for minute in range(first, last + 1):
            clock.pass_to(minute * MINUTE)
            sweep(Store(), clock=clock)

    with pool.lease(2):
        pool.scale(3)
        shown_at = [clock()]
        assert drawn_at(plot_of(looked), shown_at[0]) == (3, 3)
        pass_minutes(1, 20)
    pool.scale(1)
    pass_minutes(21, 40)
    clock.pass_to(50 * MINUTE)  # the host is off, and nobody has checked its nodes
    assert drawn_at(plot_of(server(clock)), begun + 45 * MINUTE) is None
    pass_minutes(52, 55)
    pool.down()
    shown_at = [begun + 70 * MINUTE]

    plot = plot_of(server(lambda: shown_at[0]))
    looked.reader.read_again()
    assert plot_of(looked) == plot
    known = {-1: None, 5: (3, 3), 15: (3, 3), 25: (1, 1), 35: (1, 1), 54: (1, 1), 60: (0, 0), 69: (0, 0)}
    expected = known | dict.fromkeys((45, 49), (None, None))
    assert {minute: drawn_at(plot, begun + minute * MINUTE) for minute in expected} == expected
    with Store().reading() as session:
        stored = [(row.ready, row.target) for row in session.scalars(select(Size).order_by(Size.id))]
    assert list(zip(plot["ready"]["y"], plot["target"]["y"], strict=True)) == [*stored, stored[-1]]


def test_every_change_is_recorded_when_it_happens(either_tiny):
    pool = ComputePool("local://sized?max_nodes=4", holder="test:a").up()

    def recorded() -> tuple[int | None, int | None]:
        return sizes.points(Store(), "sized", 2e9)[-1][1:]

    pool.lease(2)
    assert recorded() == (2, 2)
    ComputePool("sized", holder="test:b").lease(1, exclusive=True, is_async=True)
    assert recorded()[1] == 3
    pool.release()
    pool.scale(2)
    wait_until(lambda: (sweep(Store()), recorded())[1] == (2, 2), "two nodes")
    pool.down()
    assert recorded() == (0, 0)
    steps = [each[1:] for each in sizes.points(Store(), "sized", 0.0)]
    assert [each for each in steps if each[1] == 2][:2] == [(1, 2), (2, 2)]  # the node's own process has recorded this
    pool.delete()
    assert sizes.points(Store(), "sized", 2e9) == []


def test_hosts_whose_clocks_differ_record_no_size_that_has_not_changed(on_postgresql, tiny):
    ComputePool("local://sized?max_nodes=4").up()
    recorded = len(sizes.points(Store(), "sized", 0.0))
    for differs_by in (0.0, 3600.0, 0.0):
        with Store().transaction() as session:
            sizes.note(session, "sized", time.time() + differs_by, has_looked=True)
            assert not should_note_size(session.get_one(Pool, "sized"), shared_now(session, 0.0))
    assert len(sizes.points(Store(), "sized", 0.0)) == recorded


def test_nothing_is_drawn_for_a_head_that_does_not_answer(tiny, clock, monkeypatch):
    begun = clock()
    ComputePool("local://sized?max_nodes=4", clock=clock).up()
    monkeypatch.setattr(TinyBackend, "look", lambda *_: Seen(silence="no answer"))
    clock.pass_to(10 * MINUTE)
    assert reconcile(Store(), "sized", clock=clock).sentences() == []
    assert drawn_at(plot_of(server(clock)), begun + 5 * MINUTE) is None
    ComputePool("sized", clock=clock).alter(max_nodes=3)
    assert drawn_at(plot_of(server(clock)), clock()) is None


def test_old_sizes_are_forgotten_and_a_pool_without_rows_has_an_empty_plot(tiny, clock, monkeypatch):
    monkeypatch.setattr(rows, "KEEP_SIZES", 2)
    ComputePool("local://sized?max_nodes=4", clock=clock).up()
    kept = sizes.points(Store(), "sized", clock())[-3:]
    rows.retain(Store(), "sized", clock())
    assert sizes.points(Store(), "sized", clock())[:2] == kept[:2]
    with Store().transaction() as session:
        session.execute(delete(Size))
    assert plot_of(server(clock))["ready"] == {"x": [], "y": []}
