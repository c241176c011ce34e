"""A promotion is part of the Prefect transaction around its task."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.transactions import atransaction, transaction

from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.prefect import adistributed_train, distributed_train
from shoal.prefect.job_task import Enclosing
from shoal.state import Store
from tests.prefect import test_repeated
from tests.prefect.test_repeated import SPEC, job_of, model, trained  # noqa: F401
from tests.support.job_results import result_of
from tests.support.job_store import POOL, head, store  # noqa: F401

WITHDRAWN = "version 3 is champion: the promotion of version 4 was withdrawn"


@pytest.fixture
def happened(trained, monkeypatch):  # noqa: F811
    """What happens to promotions: each training promotes its model."""
    happened = []
    decision = {"reason": "better", "sentence": "better"}
    promoting = functools.partial(result_of, promoted=True, model_version="4", decision=decision)
    monkeypatch.setattr(test_repeated, "result_of", promoting)

    def withdraw(job_id, attempt, *, tracking_uri, holder):
        attempts.give_up(Store(), Key(job_id, attempt), 3.0)
        happened.append(("withdrawn", attempt))
        return WITHDRAWN

    monkeypatch.setattr("shoal.prefect.job_task.withdraw_promotion", withdraw)
    monkeypatch.setattr(
        "shoal.prefect.job_task.emit_outcome", lambda spec, result: happened.append(("sent", result.attempt))
    )
    return happened


def validate(happened) -> None:
    """A step after the training, which fails in the first try of the flow."""
    happened.append("validated")
    if happened.count("validated") == 1:
        raise RuntimeError("the model is not fit for use")


@pytest.mark.server
@pytest.mark.parametrize("is_async", [False, True])
def test_a_rolled_back_promotion_is_withdrawn_and_trained_again(happened, trained, monkeypatch, is_async):  # noqa: F811
    reports = []

    def store_report(spec, result, *_):
        reports.append((result.attempt, result.promoted, result.decision.sentence))

    monkeypatch.setattr("shoal.prefect.job_task.store_report", store_report)

    @flow(retries=1)
    def retrain():
        with transaction():
            distributed_train(SPEC, pool_name=POOL)
            validate(happened)

    @flow(retries=1)
    async def aretrain():
        async with atransaction():
            await adistributed_train(SPEC, pool_name=POOL)
            validate(happened)

    asyncio.run(aretrain()) if is_async else retrain()
    assert happened == ["validated", ("withdrawn", 1), "validated", ("sent", 2)]
    assert trained() == 2
    assert reports == [(1, True, "better"), (1, False, WITHDRAWN), (2, True, "better")]


@pytest.mark.server
def test_a_committed_promotion_is_final_and_sent_once(happened, trained):  # noqa: F811
    @flow(retries=2)
    def retrain():
        with transaction():
            distributed_train(SPEC, pool_name=POOL)
            if happened.count("validated") == 1:
                happened.append("validated")
                raise RuntimeError("a second try of the transaction fails")
        validate(happened)

    retrain()
    assert happened == [("sent", 1), "validated", "validated", "validated"]
    assert trained() == 1


@pytest.mark.server
def test_a_process_that_dies_in_a_transaction_leaves_the_end_of_the_promotion_to_the_next_try(
    happened,
    trained,  # noqa: F811
    monkeypatch,
):
    finish, dies = Enclosing.finish, [True, False]
    monkeypatch.setattr(Enclosing, "finish", lambda *args: dies.pop(0) or finish(*args))

    @flow(retries=1)
    def retrain():
        with transaction():
            distributed_train(SPEC, pool_name=POOL)
            validate(happened)

    retrain()
    assert happened == ["validated", "validated", ("sent", 1)]
    assert trained() == 1


class Outcome:
    """The functions to which the end of a transaction leads."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def finish(self, enclosing: Enclosing) -> None:
        enclosing.finish(lambda: self.calls.append("commit"), lambda: self.calls.append("roll back"))


def test_a_task_without_a_transaction_around_it_is_part_of_none():
    assert not Enclosing().is_open
    with transaction():
        assert not Enclosing().is_open


@pytest.mark.parametrize("fails", [True, False])
def test_a_transaction_that_ends_while_its_task_runs_decides(fails):
    outcome = Outcome()
    outer = transaction()
    around = outer.__enter__()
    with transaction():
        enclosing = Enclosing()
        assert enclosing.is_open
        around.rollback() if fails else around.commit()
        outcome.finish(enclosing)
    outer.__exit__(None, None, None)
    assert outcome.calls == ["roll back" if fails else "commit"]


def test_a_try_after_the_rollback_of_its_transaction_is_not_part_of_it():
    with transaction():
        for fails in (True, False):
            try:
                with transaction():
                    enclosing = Enclosing()
                    assert (enclosing.is_open, enclosing.is_rolled_back) == (fails, not fails)
                    if fails:
                        raise RuntimeError("a worker was lost")
            except RuntimeError:
                pass


def test_a_result_that_cannot_be_stored_after_the_commit_withdraws_nothing():
    outcome = Outcome()

    def refuse(*_, **__):
        raise OSError("the disk is full")

    store = SimpleNamespace(exists=lambda **_: False, write=refuse, supports_isolation_level=lambda _: True)  # noqa: F811
    with transaction(), transaction() as own:
        outcome.finish(Enclosing())
        own.store, own.key = store, "result"
    assert own.is_rolled_back()
    assert outcome.calls == ["commit"]
