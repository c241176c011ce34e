from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.training import memory

PEAK = """
from shoal.training import memory
before = memory.peak_rss_bytes()
held = bytearray(200 * 2**20)
high = memory.peak_rss_bytes()
del held
now = memory.reset_peak()
print(before, high, memory.peak_rss_bytes(), now)
"""


def test_the_peak_can_be_started_anew() -> None:
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    before, high, after, now = map(int, out.split())
    assert high >= before + 190 * 2**20
    assert after < before + 100 * 2**20
    assert abs(after - now) < 10 * 2**20


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, usage = tmp_path / "limit", tmp_path / "usage"
    monkeypatch.setattr(memory, "_LIMIT_FILES", (tmp_path / "absent", limit))
    monkeypatch.setattr(memory, "_USAGE_FILES", (tmp_path / "absent", usage))
    usage.write_text("400000\n")
    limit.write_text("max\n")
    assert memory.available_bytes() > 400_000
    limit.write_text("1000000\n")
    assert memory.available_bytes() == 600_000
