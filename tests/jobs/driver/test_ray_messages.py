"""Ray's messages in the log of a job."""

from __future__ import annotations

import pytest
from ray._private import worker

from shoal.pool.backends.local.raylet import shorten_messages_of_raylets


def test_the_log_of_a_raylet_that_ended_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # as before, at the end
    shorten_messages_of_raylets()
    ended = "Raylet is terminated. (1) SIGKILL. Last 20 lines of the Raylet logs:\n    [state-dump] 1\n"
    own = "of a function: Last 20 lines of the Raylet logs:\n  my own"
    for pid, line in (("raylet", ended), ("raylet", "Last words"), ("7", own)):
        worker.print_to_stdstream({"lines": [line], "pid": pid, "is_err": False}, ignore_prefix=False)
    printed = capsys.readouterr().out
    assert "Raylet is terminated. (1) SIGKILL." in printed and "state-dump" not in printed
    assert "Last words" in printed and "my own" in printed
