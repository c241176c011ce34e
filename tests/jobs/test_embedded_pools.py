"""Jobs on embedded pools, which another process of the same script submits again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sqlalchemy import delete

from shoal.errors import JobBusyError, PoolNotFoundError
from shoal.jobs import JobHandle, submission
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.specs.training import JobSpec
from shoal.os_processes import ProcessId
from shoal.pool.endpoint import Endpoint
from shoal.state import Store
from shoal.state.schema import JobState, Pool
from tests.support.fake_ray_head import FakeHead
from tests.support.job_store import POOL, add_pool

Submit = Callable[..., JobHandle]


@pytest.fixture
def heads(head: FakeHead, another_head: FakeHead) -> dict[str, FakeHead]:
    """The heads of two embedded pools."""
    return {"first": head, "second": another_head, POOL: head}


@pytest.fixture
def submit(store: Store, heads: dict[str, FakeHead], spec: JobSpec) -> Submit:
    """Submit the same job, possibly with another option, to a pool."""

    def endpoint_of(pool: str) -> Endpoint:
        if pool not in heads:
            raise PoolNotFoundError(pool, list(heads))
        return heads[pool].endpoint

    def submit(pool: str, **changes: object) -> JobHandle:
        config = spec.run_config.model_copy(update={"pool_name": pool, "job_id": "nightly"})
        changed = spec.model_copy(update={"run_config": config, **changes})
        return submission.submit(changed, endpoint_of=endpoint_of)

    return submit


def test_another_process_attaches_to_a_job_on_the_pool_of_a_process_that_runs(
    store: Store, submit: Submit, heads: dict[str, FakeHead]
) -> None:
    for name in ("first", "second"):
        add_pool(store, name, ProcessId.mine())
    first = submit("first")
    again = submit("second")
    assert (again.attempt, again.pool) == (first.attempt, "first")
    assert again.status().state == JobState.PENDING.value
    assert [len(heads[name].jobs) for name in ("first", "second")] == [1, 0]
    for name, changes in ((POOL, {}), ("second", {"n_estimators": 7})):
        with pytest.raises(JobBusyError, match="with another spec"):
            submit(name, **changes)


@pytest.mark.parametrize("changes", [{}, {"n_estimators": 7}])
def test_the_job_of_a_process_that_has_ended_runs_again_at_once(
    store: Store, submit: Submit, heads: dict[str, FakeHead], changes: dict[str, int]
) -> None:
    add_pool(store, "first", replace(ProcessId.mine(), start=1))  # an earlier process with the id of this one
    add_pool(store, "second", ProcessId.mine())
    submit("first")
    again = submit("second", **changes)
    assert (again.attempt, again.pool) == (2, "second")
    assert [len(heads[name].jobs) for name in ("first", "second")] == [1, 1]
    earlier, later = (attempts.load(store, Key("nightly", attempt)) for attempt in (1, 2))
    assert "the process that started the job, and to which its pool belonged, has ended" in (earlier.error or "")
    assert (earlier.spec["fingerprint"] == later.spec["fingerprint"]) is (not changes)
    with store.reading() as session:
        assert session.get(Pool, "first") is None


def test_a_job_that_is_lost_is_no_reason_to_refuse_another_spec(
    store: Store, submit: Submit, heads: dict[str, FakeHead]
) -> None:
    add_pool(store, "first", ProcessId.mine())
    add_pool(store, "second", ProcessId.mine())
    submit("first")
    with store.transaction() as session:
        session.execute(delete(Pool).where(Pool.name == "first"))
    del heads["first"]
    assert submit("second", n_estimators=7).attempt == 2
    assert attempts.load(store, Key("nightly", 1)).error == 'pool "first" went down while the job was pending'
