"""What the error of a node says that could not start."""

from __future__ import annotations

import os

import pytest

from shoal.pool.supervisor import log_failure


@pytest.mark.parametrize("error", [Exception("The current node timed out during startup."), TimeoutError("no answer")])
def test_a_start_that_took_too_long_names_the_load(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.4, 3.0, 1.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    said = log_failure("w1", error)
    assert str(error) in said and "the load average of this machine is 9.4, with 2 CPUs" in said


def test_another_failure_does_not() -> None:
    assert "load average" not in log_failure("w1", RuntimeError("no such file"))
