"""A driver's log: a line that cannot be written is lost, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.jobs.files.logs import teed


def test_a_log_on_a_full_disk_keeps_nothing_from_being_done(capsys: pytest.CaptureFixture[str]) -> None:
    with teed(Path("/dev/full"), lambda text: text):
        print("the model is written", flush=True)
    assert capsys.readouterr().out == "the model is written\n"


def test_a_lone_surrogate_is_logged_as_an_escape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with teed(tmp_path / "driver.log", lambda text: text):
        print("ValueError: \udc80", flush=True)
    assert (tmp_path / "driver.log").read_text() == "ValueError: \\udc80\n"
    assert capsys.readouterr().out == "ValueError: \\udc80\n"
