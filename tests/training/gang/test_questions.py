"""Workers ask the driver, and wait for its answer, which it may give later."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import TrainingError, WorkerLostError
from shoal.training.gang.gang import Gang
from shoal.training.gang.placement import GangShape
from shoal.training.reporting import gang_context
from tests.support.without_ray import nodes_without_ray

pytestmark = pytest.mark.processes


def ask_three_times() -> list[Any]:
    context = gang_context()
    assert context.ask is not None
    return [context.ask({"rank": context.rank, "step": step, "text": "x" * 70_000}) for step in range(3)]


def ask_and_end(ends: bool) -> Any:
    context = gang_context()
    if ends:
        import os

        os._exit(3)
    assert context.ask is not None
    return context.ask({})


def test_the_driver_answers_when_all_workers_have_asked():
    waiting: list[Any] = []
    seen = []

    def on_question(rank: int, question: dict[str, Any], reply: Any) -> None:
        seen.append((rank, question["step"]))
        waiting.append((rank, reply))
        if len(waiting) == 2:
            for each, answer in waiting:
                answer({"to": each, "list": [None, 0.1, "ü\n" * 100_000]})
            waiting.clear()

    with nodes_without_ray(2):
        gang = Gang.start(GangShape(2, 1))
        answers = gang.run(ask_three_times, [()] * 2, on_question=on_question)
        gang.finish()

    assert [sorted(seen[start : start + 2]) for start in (0, 2, 4)] == [[(0, step), (1, step)] for step in range(3)]
    assert [[answer["to"] for answer in each] for each in answers] == [[0] * 3, [1] * 3]
    assert answers[0][0]["list"] == [None, 0.1, "ü\n" * 100_000]


def test_a_worker_that_waits_for_an_answer_ends_when_another_worker_is_lost():
    with nodes_without_ray(2):
        gang = Gang.start(GangShape(2, 1))
        with pytest.raises(WorkerLostError, match="rank 1"):
            gang.run(ask_and_end, [(False,), (True,)], on_question=lambda *_: None)
        assert gang.ended


def test_an_error_of_the_driver_while_it_answers_ends_the_gang():
    def refuse(*_: Any) -> None:
        raise TrainingError("the study is not mine")

    with nodes_without_ray(1):
        gang = Gang.start(GangShape(1, 1))
        with pytest.raises(TrainingError, match="the study is not mine"):
            gang.run(ask_three_times, [()], on_question=refuse)
        assert gang.ended
