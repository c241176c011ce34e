"""Secrets go out of all that a process, its C libraries and its subprocesses print, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SECRET = "\n".join(["-----BEGIN KEY-----", "MIIEvQIBADANsecretline1", "AoGBAJ7secretline2222", "-----END KEY-----", ""])

PRINTS = """
import ctypes, os, subprocess, sys
from shoal.secrets.hidden_output import hidden_output
secret = os.environ["SECRET"]
with hidden_output([secret]):
    first, second = secret.splitlines()[1:3]
    print("python", first)
    print("stderr", repr(secret), file=sys.stderr)
    subprocess.run(["sh", "-c", f"echo subprocess {second}; printf 'no line break'"])
    ctypes.CDLL(None).puts(f" library {first}".encode())
    ctypes.CDLL(None).fflush(None)
    os.write(1, first[:9].encode())
    os.write(1, first[9:].encode() + b" http://me:hunter22@host/x \\xff\\n")
print("after")
"""


def run(program: str, log: Path) -> int:
    with log.open("wb") as file:
        return subprocess.run(
            [sys.executable, "-c", program], stdout=file, stderr=file, env={**os.environ, "SECRET": SECRET}, timeout=60
        ).returncode


def test_the_output_of_subprocesses_and_libraries_loses_its_secrets(tmp_path: Path) -> None:
    assert run(PRINTS, tmp_path / "log") == 0

    lines = (tmp_path / "log").read_bytes().split(b"\n")
    assert sorted(lines[:-2]) == sorted(
        [b"python ***", b"stderr '***\\n'", b"subprocess ***", b"no line break library ***", b"*** http://host/x \xff"]
    )
    assert lines[-2:] == [b"after", b""]


def test_the_last_lines_before_a_crash_are_not_lost(tmp_path: Path) -> None:
    code = run(
        PRINTS.replace('print("after")', "").replace(
            "os.write(1, first[:9]",
            "print('last', first, flush=True)\n    os.kill(os.getpid(), 9)\n    os.write(1, first[:9]",
        ),
        tmp_path / "log",
    )

    assert code == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while b"last ***" not in (tmp_path / "log").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"last ***\n" in (tmp_path / "log").read_bytes()
    assert b"secretline" not in (tmp_path / "log").read_bytes()


def test_a_library_that_prints_much_while_it_holds_the_interpreter_is_not_blocked(tmp_path: Path) -> None:
    program = """
import ctypes
from shoal.secrets.hidden_output import hidden_output
with hidden_output(["hunter22xyz"]):
    ctypes.PyDLL(None).puts(b"the pin is hunter22xyz " * 50_000)
    ctypes.PyDLL(None).fflush(None)
"""
    assert run(program, tmp_path / "log") == 0
    assert (tmp_path / "log").read_bytes() == b"the pin is *** " * 50_000 + b"\n"
