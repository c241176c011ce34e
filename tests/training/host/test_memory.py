from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from shoal.training.host import memory

PEAK = """
from shoal.training.host import memory
before = memory.peak_rss_bytes()
held = bytearray(200 * 2**20)
high = memory.peak_rss_bytes()
del held
now = memory.reset_peak()
print(before, high, memory.peak_rss_bytes(), now)
"""


@pytest.mark.processes
def test_the_peak_can_be_started_anew() -> None:
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    before, high, after, now = map(int, out.split())
    assert high >= before + 190 * 2**20
    assert after < before + 100 * 2**20
    assert abs(after - now) < 10 * 2**20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(memory, "_MOUNT", tmp_path / "mount")
    return tmp_path / "mount"


def group(folder: Path, names: tuple[str, str], limit: str, used: int, stat: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{stat}")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def test_the_tightest_limit_on_the_way_up_counts(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/pods/mine\n")
    group(groups / "pods" / "mine", V2, "max", 300_000)
    assert memory.room_bytes() is None
    group(groups / "pods", V2, "1000000", 400_000)
    assert memory.available_bytes() == 600_000
    group(groups / "pods" / "mine", V2, "800000", 300_000, "inactive_file 50000")
    assert memory.available_bytes() == 550_000
    group(groups / "pods" / "mine", V2, "200000", 300_000)
    assert memory.available_bytes() == 0


def test_version_1_has_memory_in_a_hierarchy_of_its_own(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("5:cpu:/\n4:memory:/mine\n0::/\n")
    group(groups / "memory" / "mine", V1, "1000000", 400_000, "inactive_file 1\ntotal_inactive_file 100000")
    assert memory.available_bytes() == 700_000


def test_a_container_that_is_told_its_hosts_paths_looks_at_its_own(groups: Path, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/docker/abc\n")
    group(groups, V2, "1000000", 400_000)
    assert memory.available_bytes() == 600_000


@pytest.mark.parametrize(
    ("membership", "file"),
    [("0::/mine\n", "mine/memory.events"), ("4:memory:/mine\n", "memory/mine/memory.oom_control")],
)
def test_killed_processes_are_counted_from_the_start(groups: Path, tmp_path: Path, membership: str, file: str) -> None:
    (tmp_path / "membership").write_text(membership)
    assert memory.OomKills().told() == ""  # not known
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text("oom 4\noom_kill 3\n")
    kills = memory.OomKills()
    assert kills.told() == ""
    (groups / file).write_text("oom 7\noom_kill 5\n")
    assert kills.told() == "the kernel has killed 2 processes of the driver's container for lack of memory"


def test_without_groups_the_machine_decides(groups: Path) -> None:
    assert memory.room_bytes() is None
    assert memory.available_bytes() > 2**20


SPARING = """
import sys
from shoal.training.host import memory
if sys.argv[1] == "trim_memory":
    memory.trim_memory()
import numpy, psutil, pyarrow
before = psutil.Process().memory_info().rss
for _ in range(3):
    held = [numpy.ones(2**18) for _ in range(50)]  # 2 MiB each
    del held
    held = [numpy.ones(2**14) for _ in range(800)]  # 128 KiB each
    del held
    memory.trim()
print(pyarrow.default_memory_pool().backend_name, (psutil.Process().memory_info().rss - before) >> 20)
"""


@pytest.mark.processes
def test_a_sparing_process_keeps_little_of_what_it_frees() -> None:
    out = subprocess.run(
        [sys.executable, "-c", SPARING, "trim_memory"], capture_output=True, text=True, check=True
    ).stdout
    pool, kept = out.split()
    assert pool == "system"
    assert int(kept) < 20


def test_a_lack_of_memory_is_recognised() -> None:
    shortages = (MemoryError(), pa.ArrowMemoryError("malloc of size 8 failed"), RuntimeError("std::bad_alloc"))
    assert all(map(memory.is_shortage, shortages))
    assert not memory.is_shortage(ValueError("a bad label"))
