from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError

from shoal.errors import StoreError, StoreUnreachableError
from shoal.jobs.journal import steps
from shoal.jobs.journal.steps import patiently
from shoal.state import Store
from shoal.state.schema import Lock


def test_a_store_that_is_away_is_asked_again(fresh_home, monkeypatch):
    monkeypatch.setattr(steps, "STORE_PERIOD", 0.0)
    answers = iter([StoreUnreachableError("away"), "there"])

    def act() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert patiently(Store(), act) == "there"


def test_a_statement_that_the_store_will_never_accept_is_not_repeated(fresh_home):
    store, tries = Store(), []

    def take_twice() -> None:
        tries.append(1)
        with store.transaction() as session:
            session.add_all([Lock(name="a", holder=holder, expires_at=0) for holder in ("me", "other")])
            session.flush()

    with pytest.raises(StoreError) as caught:
        patiently(store, take_twice)
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert len(tries) == 1
