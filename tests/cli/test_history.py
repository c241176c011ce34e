"""`shoal history`."""

import time

import pytest

from shoal.history import ActionKind, record
from shoal.state import Store
from tests.cli.conftest import document


@pytest.fixture
def lines(a_pool):
    now = time.time()
    with Store().transaction() as session:
        for kind, age in ((ActionKind.ALTERED, 3 * 24 * 3600), (ActionKind.SCALED, 60)):
            record(session, kind, a_pool, holder="cli:anna@here", at=now - age, pool=a_pool, detail="1 -> 3 nodes")
    return now


def test_the_record_is_shown_and_filtered(shoal, lines, a_pool):
    text = " ".join(shoal("history").stdout.split())
    assert f"cli:anna@here scaled {a_pool} {a_pool} 1 -> 3 nodes done" in text
    assert text.index("scaled") < text.index("altered")

    [line] = document(shoal("history", "--pool", a_pool, "--since", "1d", "--json").stdout)["history"]
    assert (line["kind"], line["actor"], line["outcome"]) == ("scaled", "cli:anna@here", "done")
    assert line["at"] == pytest.approx(lines - 60)
    assert "altered" not in shoal("history", "--kind", "scaled").stdout
    assert len(document(shoal("history", "--limit", "1", "--json").stdout)["history"]) == 1


def test_a_deleted_pool_keeps_its_lines_and_an_unknown_one_is_refused(shoal, lines, a_pool):
    assert shoal("pool", "delete", a_pool).exit_code == 0
    assert "deleted" in shoal("history", "--pool", a_pool).stdout

    assert 'pool "retrian" does not exist' in shoal("history", "--pool", "retrian").stderr


def test_wrong_filters_are_named(shoal, fresh_home):
    assert "no actions found" in shoal("history").stdout
    assert "use one of created, started" in shoal("history", "--kind", "scale").stderr
    assert "write hours, days or weeks" in shoal("history", "--since", "monday").stderr
    assert document(shoal("history", "--kind", "scale", "--json").stdout)["error"]["exit_code"] == 2


def test_a_sweep_by_the_command_is_recorded_for_its_user(shoal, fresh_home):
    assert shoal("sweep").exit_code == 0

    assert " swept " in shoal("history").stdout
