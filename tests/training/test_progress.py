"""How a training says how far it is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from shoal.training.boosting import progress
from shoal.training.boosting.progress import Rounds

HISTORY = {"eval": {"rmse": [3.0, 2.5], "mae": [1.0, 0.123456]}}

BAR = """
from shoal.training.boosting.progress import Rounds
with Rounds() as rounds:
    rounds.read("a line of the log")
    rounds.read("round 3 of 7, eval-rmse: 2.5")
with Rounds() as rounds:
    rounds.done(5, 7, {"eval": {"rmse": [2.25]}})
"""


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Rounds() as rounds:
        rounds.done(1, 9, HISTORY)
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(progress, "_SAY_EVERY_SECONDS", 0.0)
        rounds.done(2, 9, HISTORY)
        assert capsys.readouterr().out == "round 2 of 9, eval-rmse: 2.5, eval-mae: 0.12346\n"
        rounds.read("round 2 of 9, eval-rmse: 2.5")
        assert capsys.readouterr().out == "round 2 of 9, eval-rmse: 2.5\n"


def test_what_is_printed_anyway_is_not_said_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SAY_EVERY_SECONDS", 0.0)
    with Rounds(quiet=True) as rounds:
        rounds.done(2, 9, HISTORY)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar() -> None:
    mine, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", BAR], stdout=subprocess.PIPE, stderr=theirs, text=True, env=env)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(mine, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
    os.close(mine)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert out == "a line of the log\n"
    assert b"3/7" in shown
    assert b"5/7" in shown
    assert b"eval-rmse: 2.25" in shown
