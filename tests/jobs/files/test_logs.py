"""A driver's log: a line that cannot be written is lost, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.jobs.credentials import Secrets
from shoal.jobs.files import logs
from shoal.jobs.files.logs import teed
from shoal.jobs.journal.attempts import Key
from shoal.secrets.known_secrets import KnownSecrets, SecretStream
from shoal.state import Store


def test_a_log_on_a_full_disk_keeps_nothing_from_being_done(capsys: pytest.CaptureFixture[str]) -> None:
    with teed(Path("/dev/full"), lambda: SecretStream(KnownSecrets([]))):
        print("the model is written", flush=True)
    assert capsys.readouterr().out == "the model is written\n"


def test_a_lone_surrogate_is_logged_as_an_escape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with teed(tmp_path / "driver.log", lambda: SecretStream(KnownSecrets([]))):
        print("ValueError: \udc80", flush=True)
    assert (tmp_path / "driver.log").read_text() == "ValueError: \\udc80\n"
    assert capsys.readouterr().out == "ValueError: \\udc80\n"


def test_a_secret_that_is_printed_in_pieces_is_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secrets = Secrets({"PIN": "hunter22xyz"}, named=frozenset(["PIN"]))
    with teed(tmp_path / "driver.log", Secrets().stream) as filter_by:
        filter_by(secrets.stream)
        for piece in ("the pin is ", "hunt", "er22", "xyz", "\n", "hund", "red\n", "the pin is hunter22x"):
            print(piece, end="", flush=True)
    assert (tmp_path / "driver.log").read_text() == "the pin is ***\nhundred\nthe pin is ***"
    assert capsys.readouterr().out == "the pin is ***\nhundred\nthe pin is ***"


def test_a_secret_is_hidden_though_another_thread_prints_between_its_pieces(tmp_path: Path) -> None:
    secrets = Secrets({"PIN": "hunter22xyz"}, named=frozenset(["PIN"]))
    with teed(tmp_path / "driver.log", secrets.stream):
        print("hunter", end="")
        other = threading.Thread(target=print, args=("epoch 1",))
        other.start()
        other.join()
        print("22xyz")
    assert (tmp_path / "driver.log").read_text() == "epoch 1\n***\n"


def test_a_log_has_a_limit_and_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LIMIT_BYTES", 1000)
    monkeypatch.setattr(logs, "_TAIL_BYTES", 200)
    lines = [f"line {number}" for number in range(1000)]
    with teed(tmp_path / "driver.log", Secrets().stream):
        for line in lines:
            print(line)
    written = (tmp_path / "driver.log").read_text().splitlines()
    notice = next(at for at, line in enumerate(written) if "this log has reached" in line)
    gap = next(at for at, line in enumerate(written) if "left out here" in line)
    assert [line for line in written[:gap] if line.startswith("line")] + written[gap + 1 :] == [
        line for line in lines if line in written
    ]
    assert written[-1] == lines[-1]
    missing = sum(len(line) + 1 for line in lines if line not in written) + 1  # the newline before the notice
    assert written[gap] == f"[{missing:,} bytes of output were left out here]" and notice < gap


_HANGS = """
import atexit, sys, threading
from pathlib import Path
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import logs
from shoal.training.host import own_process
logs.LIMIT_BYTES = 10
with logs.teed(Path(sys.argv[1]), Secrets().stream):
    print("a line of more than the limit")
    print("the last line")
    atexit.register(threading.Event().wait)
    own_process.end_within(0.01, 7, lambda: (logs.write_rest(), 1 / 0))
"""


def test_the_end_of_a_log_over_the_limit_is_written_although_the_exit_handlers_hang(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", _HANGS, tmp_path / "driver.log"], check=False).returncode == 7
    written = (tmp_path / "driver.log").read_text()
    assert "the last line\nthe threads and exit handlers of the driver did not end within 0.01 s\n" in written


def test_a_followed_log_may_change_colours_but_not_control_the_terminal(store: Store) -> None:
    key = Key("job", 1)
    logs.log_path(key).parent.mkdir(parents=True)
    logs.log_path(key).write_bytes(b"\x1b[1;32mok\x1b[0m\tnext\n\x1b[2J\x9b\n\x1b]0;title\x07\n")
    lines = list(logs.LogFollower(key, str).lines(ended=True))
    assert lines == ["\x1b[1;32mok\x1b[0m\tnext", "\\x1b[2J\ufffd", "\\x1b]0;title\\x07"]
