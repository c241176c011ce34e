"""What a worker that its driver has started has of its node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.training.gang.local_node import NodeWatch, NodeWithRay
from shoal.training.host import memory


def test_if_memory_is_short_the_workers_of_a_node_end_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (NodeWatch("raylet", 0, os.open(tmp_path / "workers", os.O_WRONLY | os.O_CREAT)) for _ in range(2))
    monkeypatch.setattr(memory, "total_bytes", lambda: 1_000)
    monkeypatch.setattr(memory, "available_bytes", lambda: 51)
    assert not first.must_free_memory()
    monkeypatch.setattr(memory, "available_bytes", lambda: 50)
    assert first.must_free_memory()
    assert not second.must_free_memory()
    os.close(first.file)  # as the kernel does when the process ends
    assert second.must_free_memory()
    os.close(second.file)


def test_a_node_that_has_ended_or_whose_id_another_process_has_cannot_be_entered(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError, match="has ended"):
        NodeWithRay(str(tmp_path), os.getpid(), {"TMPDIR": str(tmp_path)}).enter()
    assert not list(tmp_path.iterdir())
    assert os.environ.get("TMPDIR") != str(tmp_path)
