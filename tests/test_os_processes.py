"""Waiting for the end of a process."""

from __future__ import annotations

import subprocess
import sys
import time

from shoal.os_processes import ProcessId, sleep_until_end

A_MINUTE_S = 60.0


def test_a_sleep_ends_with_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        sleep_until_end(0.01, identity)
        assert identity.alive()
        assert process.stdin is not None
        process.stdin.close()
        began = time.monotonic()
        sleep_until_end(A_MINUTE_S, identity)
        assert time.monotonic() - began < A_MINUTE_S
        assert not identity.alive()
        # It has ended, but this process has not asked for its exit code yet.
        began = time.monotonic()
        sleep_until_end(0.05, identity)
        assert time.monotonic() - began >= 0.05
