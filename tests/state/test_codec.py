"""The same values come back from SQLite and from PostgreSQL, whatever a float or a text holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from shoal.state import Store, databases
from shoal.state.databases import storable
from shoal.state.schema import Job, JobState, Lock
from tests.support.homes import STORES, new_home

NAN, INF = float("nan"), float("inf")
TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
"""All characters, among them NUL and surrogates without a partner."""
KEYS = st.one_of(TEXTS, st.sampled_from(["$float", "$$float", "$$$float", "nan"]))
DOCUMENTS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.sampled_from(["nan", "inf", "-inf"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


def paired(value: Any) -> Any:
    """Two surrogates side by side are one character to every decoder of JSON."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if isinstance(value, dict):
        return {paired(key): paired(item) for key, item in value.items()}
    return [paired(item) for item in value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """Whether two documents are equal where NaN equals NaN, and 0.0 neither -0.0 nor 0."""
    return repr(one) == repr(other)


def attempt(**fields: Any) -> Job:
    return Job(
        **{
            "id": "job", "attempt": 1, "pool": "p", "holder": "h", "spec": {}, "state": JobState.FAILED, "endpoint": {},
            "last_polled_at": 0.0, "created_at": 0.0,
        }
        | fields
    )  # fmt: skip


def stored(store: Store, **fields: Any) -> Job:
    """A job's row as another process reads it."""
    with store.transaction() as session:
        session.merge(attempt(**fields))
    with store.reading() as session:
        return session.get_one(Job, ("job", 1))


@pytest.mark.parametrize(
    "document",
    [
        {"missing": NAN, "most": INF, "least": -INF, "zero": -0.0, "list": [NAN, [INF]]},
        {"$float": "nan"},
        {"$float": NAN},
        {"$float": 5, "other": 6},
        {"$$float": {"$float": "inf"}},
        {"$float": {"$float": {"$$float": -INF}}},
        {"text": "NUL \0, a surrogate \udc80, NaN, Infinity", "\0": "\ud800"},
    ],
)
def test_a_document_comes_back_as_it_was(either_store, document):
    assert same(stored(Store(), spec=document).spec, document)


@pytest.fixture(params=STORES)
def shared_store(request) -> Any:
    """One store for all examples of a test."""
    if request.param == "postgresql":
        request.getfixturevalue("on_postgresql")
    with new_home():
        yield Store()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=st.dictionaries(KEYS, DOCUMENTS, max_size=4), error=TEXTS, holder=TEXTS)
def test_any_document_and_any_text_come_back_the_same_from_either_store(shared_store, document, error, holder):
    row = stored(shared_store, spec=document, error=error, holder=holder)
    assert same(row.spec, paired(document))
    assert (row.error, row.holder) == (storable(error), storable(holder))


@given(DOCUMENTS)
def test_what_is_written_is_strict_json_in_ascii(document):
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    written = databases.dump_json(document)
    json.loads(written, parse_constant=refuse)
    assert written.isascii() and "\0" not in written


@given(TEXTS)
def test_a_text_is_made_storable_once(given):
    once = storable(given)
    once.encode()
    assert "\0" not in once
    assert storable(once) == once
    if "\0" not in given and given.isprintable():
        assert once == given


def test_a_row_with_a_bare_nan_stays_readable(fresh_home):
    """As shoal 0.1 wrote it to SQLite."""
    store = Store()
    with store.transaction() as session:
        session.add(attempt())
    with store.transaction() as session:
        session.execute(text("""UPDATE jobs SET spec = '{"missing": NaN, "most": [Infinity, -Infinity]}'"""))
    with store.reading() as session:
        spec = session.get_one(Job, ("job", 1)).spec
    assert math.isnan(spec["missing"])
    assert spec["most"] == [INF, -INF]


def test_errors_and_holders_may_have_any_character(either_store: Path):
    store = Store()
    row = stored(store, error="died: \0 and \udcff", holder="python:\0@h", state=JobState.FAILED)
    assert (row.error, row.holder) == (r"died: \x00 and \udcff", r"python:\x00@h")
    with store.transaction() as session:
        session.add(Lock(name="a\0lock", holder="\ud800", expires_at=0))
    with store.reading() as session:
        lock = session.get(Lock, "a\0lock")
        assert lock is not None and lock.holder == r"\ud800"
