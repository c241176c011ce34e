"""A flow run that is repeated uses the jobs of its earlier tries, in whatever order and place its tasks run."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_client, unmapped
from prefect.flow_engine import run_flow
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry

from shoal import jobs
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.prefect import adistributed_train, distributed_train
from shoal.state import Store
from shoal.state.schema import JobState
from tests.support.job_results import result_of
from tests.support.job_store import POOL, head, store  # noqa: F401

pytestmark = pytest.mark.server

SPEC = {"dataset": {"paths": ["/data"]}, "input_cols": ["x"], "label_col": "y"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The file of every model."""
    path = tmp_path / "model.ubj"
    path.touch()
    return path


@pytest.fixture
def trained(server, store, head, model, monkeypatch) -> Iterator[Callable[[], int]]:  # noqa: F811
    """Count the trainings; each succeeds at once, on a head that is an HTTP server."""
    where = lambda name: head.endpoint  # noqa: E731
    monkeypatch.setattr("shoal.prefect.job_task.submit", functools.partial(jobs.submit, endpoint_of=where))
    over = threading.Event()

    def drive() -> None:
        while not over.wait(0.02):
            for job in jobs.list_jobs(states=(JobState.PENDING,)):
                key = Key(job.job_id, job.attempt)
                result = result_of(job_id=job.job_id, attempt=job.attempt, model_path=str(model)).document()
                if attempts.start(Store(), key, {}, 1.0):
                    attempts.end(Store(), key, JobState.SUCCEEDED, 2.0, result=result)

    driver = threading.Thread(target=drive)
    driver.start()
    yield lambda: len(jobs.list_jobs())
    over.set()
    driver.join()


def train(**options: Any) -> tuple[str, int]:
    return job_of(distributed_train.with_options(**options)(SPEC, pool_name=POOL))


def job_of(result: dict[str, Any]) -> tuple[str, int]:
    return result["job_id"], result["attempt"]


def one() -> list[tuple[str, int]]:
    return [train()]


def many() -> list[tuple[str, int]]:
    """Trainings of which all but one are equal."""

    async def together():
        return await asyncio.gather(*(adistributed_train(SPEC, pool_name=POOL) for _ in range(2)))

    specs = [SPEC, {**SPEC, "label_col": "z"}]
    mapped = distributed_train.map(specs, pool_name=unmapped(POOL)).result()
    return [train(), train(), *map(job_of, mapped), *map(job_of, asyncio.run(together()))]


class Failing:
    """A flow whose first try fails after its trainings."""

    def __init__(self, body: Callable[[], list[tuple[str, int]]], **options: Any) -> None:
        self.tries: list[list[tuple[str, int]]] = []
        self.run_id: UUID | None = None

        @flow(**options)
        def failing() -> None:
            self.run_id = UUID(str(flow_run.id))
            self.tries.append(sorted(body()))
            if len(self.tries) == 1:
                raise RuntimeError("the report could not be written")

        self.flow: Flow[..., Any] = failing

    def retry(self) -> None:
        """What *Retry* in the UI does, and the worker that runs the flow again."""
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self.run_id, AwaitingRetry(), force=True)
            run_flow(self.flow, flow_run=client.read_flow_run(self.run_id))


def test_a_retry_of_the_flow_trains_nothing_again(trained):
    failing = Failing(many, retries=1)
    failing.flow()
    assert failing.tries[0] == failing.tries[1]
    assert len(set(failing.tries[0])) == trained() == 6
    assert {job.task for job in jobs.list_jobs()} == {"failing.distributed_train", "failing.adistributed_train"}


def test_a_subflow_that_runs_again_trains_nothing_again(trained):
    tries = []

    @flow
    def inner():
        tries.append((f"prefect:{flow_run.id}", train()))
        if len(tries) == 1:
            raise RuntimeError("the report could not be written")

    @flow
    def outer():
        inner()

    @flow(retries=1)
    def root():
        train()
        outer()

    root()
    (before, first), (after, second) = tries
    assert first == second and trained() == 2
    assert before != after == attempts.load(Store(), Key(*first)).holder


def test_retry_by_the_api_trains_nothing_again_and_a_new_run_does(trained, logged):
    failing = Failing(one)
    assert failing.flow(return_state=True).is_failed()
    failing.retry()
    assert failing.tries[0] == failing.tries[1]
    assert trained() == 1
    logged("its result is used, and nothing is trained again")
    failing.flow()
    assert trained() == 2


@pytest.mark.parametrize("gone", ["model", "option"])
def test_it_trains_anew_without_the_model_and_with_refresh_cache(trained, model, gone):
    failing = Failing(lambda: [train(refresh_cache=gone == "option")])
    failing.flow(return_state=True)
    if gone == "model":
        model.unlink()
    failing.retry()
    assert [tries[0][1] for tries in failing.tries] == [1, 2]


def function(source: str) -> Callable[[], int]:
    found: dict[str, Any] = {}
    exec(source, found)
    return found["train"]


@pytest.mark.parametrize(("corrected", "expected"), [("return 2", 2), ("return 1  # corrected", 1)])
def test_a_corrected_function_is_trained(trained, corrected, expected):
    sources = ["return 1", corrected]
    failing = Failing(
        lambda: [
            job_of(distributed_train({}, train_func=function(f"def train():\n    {sources.pop(0)}"), pool_name=POOL))
        ]
    )
    failing.flow(return_state=True)
    failing.retry()
    assert trained() == expected


def test_a_retry_of_a_task_whose_value_could_not_be_stored_takes_the_result_and_sends_no_event_again(
    trained, monkeypatch
):
    sent, errors = [], [RuntimeError("the value could not be stored")]
    monkeypatch.setattr("shoal.prefect.job_task.emit_outcome", lambda spec, outcome: sent.append(outcome))
    monkeypatch.setattr("shoal.prefect.job_task.task_value", lambda result: raise_first(errors) or result.to_dict())

    @flow
    def trains() -> list[tuple[str, int]]:
        return [train(retries=1, retry_delay_seconds=0), train()]

    first, second = trains()
    assert trained() == 2 and first != second
    assert [outcome.job_id for outcome in sent] == [first[0], second[0]]


def raise_first(errors: list[Exception]) -> None:
    if errors:
        raise errors.pop()


def test_a_task_without_a_flow_has_a_job_of_its_own(trained):
    assert train() != train()
    assert trained() == 2
