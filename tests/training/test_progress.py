"""Progress of a training: the record, and its display in a terminal and in a log."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.data.planning import GangPosition
from shoal.training import reporting
from shoal.training.boosting import messages as boosting
from shoal.training.boosting.messages import RoundReporter, by_round
from shoal.training.reporting import GangContext, Progress, ProgressDisplay

HISTORY = {"eval": {"rmse": [3.0, 2.5], "mae": [1.0, 0.123456]}}
AT_2 = Progress(2, 9, "rounds", by_round(HISTORY)[-1])

BAR = """
import math
import typer
from shoal.training.reporting import say
from shoal.training.reporting import Progress, ProgressDisplay
with ProgressDisplay(first_line_s=math.inf) as display:
    say("a line of the log")
    display.show(Progress(3, 7, "rounds", {"eval-rmse": 2.5}))
    say("a line under a bar")
    typer.echo("an error under a bar", err=True)
with ProgressDisplay(first_line_s=math.inf) as display:
    display.show(Progress(5, 7, "rounds", {"eval-rmse": 2.25}))
with ProgressDisplay(first_line_s=0.0) as display:
    display.show(Progress(12, None, "steps", {"loss": 0.5}))
"""


def test_a_record_as_text():
    assert str(AT_2) == "round 2 of 9, eval-rmse: 2.5, eval-mae: 0.12346"
    assert str(Progress(0, None, "steps", {"loss": math.nan})) == "step 0, loss: nan"
    assert str(Progress(1, 2, "rounds")) == "round 1 of 2"


def test_a_stored_record_is_bounded_and_comes_back_the_same():
    assert Progress.of(AT_2.document()) == AT_2
    many = {f"{number}-\udc80{'m' * 1000}": 1.0 for number in range(100)}
    stored = Progress.of(Progress(1, None, "steps", many).document())
    assert len(stored.metrics) == 20
    assert all(name.encode().startswith(f"{at}-\\udc80m".encode()) for at, name in enumerate(stored.metrics))
    assert max(map(len, stored.metrics)) <= 110


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    ProgressDisplay(first_line_s=60.0).show(AT_2)
    ProgressDisplay(first_line_s=math.inf).show(AT_2)
    assert capsys.readouterr().out == ""
    display = ProgressDisplay(first_line_s=0.0)
    display.show(AT_2)
    display.show(AT_2)
    assert capsys.readouterr().out == f"{AT_2}\n"
    monkeypatch.setattr(reporting, "PROGRESS_LINE_PERIOD_S", 0.0)
    display = ProgressDisplay(first_line_s=0.0)
    display.show(AT_2)
    display.show(AT_2)
    assert capsys.readouterr().out == f"{AT_2}\n{AT_2}\n"


def test_a_terminal_gets_a_bar():
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
    assert out == "a line of the log\na line under a bar\n"
    for text in (b"3/7", b"an error under a bar\r\n", b"5/7", b"eval-rmse: 2.25", b"12/?", b"loss: 0.5"):
        assert text in shown


def reporter(rank: int, rounds: int, notes: list[Any]) -> RoundReporter:
    return RoundReporter(GangContext(GangPosition(rank=rank, world_size=rank + 1), note=notes.append), rounds)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_all_rounds_since_its_last_report_now_and_then(monkeypatch: pytest.MonkeyPatch, rank: int):
    now = [100.0]
    monkeypatch.setattr(boosting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notes: list[Any] = []
    reports = reporter(rank, 10, notes)
    rmse: list[float] = [0.0] * 10  # known from the checkpoint
    for rounds, now[0] in enumerate((101.9, 102.0, 103.9, 104.0), start=11):
        rmse.append(float(rounds))
        reports.done(rounds, {"eval": {"rmse": rmse}})
    seen = [(note["first"], note["rounds"], note["metrics"]["eval"]["rmse"]) for note in notes]
    assert seen == ([(10, 12, [11.0, 12.0]), (12, 14, [13.0, 14.0])] if rank == 0 else [])


def test_a_failed_training_reports_its_last_rounds():
    notes: list[Any] = []
    history = {"eval": {"rmse": [3.0, 2.0]}}
    with pytest.raises(ZeroDivisionError), reporter(0, 0, notes).reporting_on_error(history):
        raise ZeroDivisionError
    assert notes == [{"first": 0, "rounds": 2, "metrics": {"eval": {"rmse": [3.0, 2.0]}}}]


def test_metrics_by_round_leave_out_what_a_round_does_not_have():
    assert by_round({"a": {"x": [1.0]}, "b": {"y": [2.0, 3.0]}}) == [{"a-x": 1.0, "b-y": 2.0}, {"b-y": 3.0}]
