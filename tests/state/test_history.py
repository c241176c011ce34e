"""The record of actions: writing and reading its lines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal import history
from shoal.errors import InvalidArgumentError
from shoal.history import ActionKind, acting_as
from shoal.state import Store


def add(subject: str = "retrain", kind: ActionKind = ActionKind.SCALED, at: float = 1.0, **columns: str | None) -> None:
    with Store().transaction() as session:
        history.record(session, kind, subject, **({"holder": "cli:me@here", "pool": "retrain", "at": at} | columns))


def subjects(**filters: object) -> list[str]:
    return [line.subject for line in history.read(**filters)]


def test_lines_are_filtered_and_the_newest_is_first(either_store):
    add("a", at=1.0)
    add("b", ActionKind.CANCELLED, at=2.0, pool="other")
    add("c", ActionKind.SCALED, at=3.0, pool=None)

    assert subjects() == ["c", "b", "a"]
    assert subjects(limit=2) == ["c", "b"]
    assert subjects(pool="other") == ["b"]
    assert subjects(kind="scaled") == ["c", "a"]
    assert subjects(kind=ActionKind.SCALED, since=2) == ["c"]
    assert subjects(since=2.0) == ["c", "b"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "scale"}, "kind='scale' is not legal: use one of created, started, scaled"),
        ({"since": "monday"}, "since='monday' is not legal: use seconds"),
        ({"since": float("nan")}, "since=nan is not legal"),
        ({"limit": 0}, "limit=0 is not legal: use a whole number from 1 to 100000"),
    ],
)
def test_a_wrong_filter_is_named(fresh_home, wrong, said):
    with pytest.raises(InvalidArgumentError, match=said):
        history.read(**wrong)


def test_a_change_that_fails_leaves_no_line(either_store):
    def change() -> None:
        with Store().transaction() as session:
            history.record(session, ActionKind.ALTERED, "retrain", holder="cli:me@here", at=1.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change()
    assert history.read() == []


def test_lines_have_no_credentials_and_no_text_without_end(either_store):
    add(detail="uri=postgresql://me:hunter2@db/x, api_key=hunter3", outcome="rolled back: " + "x" * 10_000 + "\0")

    [line] = history.read()

    assert "hunter" not in str(line)
    assert "postgresql://db/x" in str(line.detail)
    assert len(line.outcome) == 2000


def test_the_innermost_name_acts_in_its_own_thread_only(fresh_home):
    with ThreadPoolExecutor(1) as other, acting_as("anna"):
        with acting_as("ben"):
            add("a")
            other.submit(add, "b").result()
        add("c")
    add("d")

    assert {line.subject: line.actor for line in history.read()} == {
        "a": "ben",
        "b": "cli:me@here",
        "c": "anna",
        "d": "cli:me@here",
    }


@pytest.mark.parametrize("name", ["", " ", "x" * 501, None])
def test_an_actor_has_a_name(name):
    with pytest.raises(InvalidArgumentError, match="1 to 500 characters"), acting_as(name):
        pass


def test_the_end_of_an_operation_is_recorded_for_its_requester(fresh_home):
    add(operation_id="1", outcome=history.REQUESTED)
    with Store().transaction() as session, acting_as("reconciler"):
        history.record_end(session, "1", "succeeded", at=2.0)
        history.record_end(session, "an operation of an older version", "succeeded", at=2.0)

    assert [(line.actor, line.outcome) for line in history.read()] == [
        ("cli:me@here", "succeeded"),
        ("cli:me@here", "requested"),
    ]
