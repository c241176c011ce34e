"""Fixture: a machine with GPUs, for this process and all that it starts, by a fake of `pynvml`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.pool.backends.local import gpus
from shoal.state.private_folders import gpu_lock

FAKE = Path(__file__).with_name("fake_nvml") / "pynvml.py"

MOST = 4
"""Largest number of GPUs of the machine."""

Machine = Callable[..., list[str]]


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A function that gives this machine a number of GPUs, and returns their UUIDs.

    Its keyword arguments: `driver=False` for a machine without one, and by the GPU's number the ids of the processes
    that use it (`pids`; None if NVML does not report them), the UUIDs of its MIG parts (`parts`), and GPUs that have
    fallen off the bus (`lost`). The UUIDs are random, because all test runs of this user share the lock files.
    """
    folder = tmp_path / "fake-nvml"
    folder.mkdir()
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(MOST)]
    shutil.copy(FAKE, folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Other test runs of this user have their turns at the same time.
    turn = f"embedded-{uuids[0]}"
    monkeypatch.setattr(gpus, "gpu_lock", lambda name: gpu_lock(turn if name == "embedded" else name))

    def give(
        number: int,
        *,
        driver: bool = True,
        pids: dict[int, list[int] | None] | None = None,
        parts: dict[int, list[str]] | None = None,
        lost: Sequence[int] = (),
    ) -> list[str]:
        def described(gpu: int) -> dict[str, Any]:
            mine = {"parts": (parts or {}).get(gpu), "pids": (pids or {}).get(gpu, []), "lost": gpu in lost}
            return {"uuid": uuids[gpu], **mine}

        machine = {"driver": driver, "gpus": [described(gpu) for gpu in range(number)]}
        (folder / "machine.json").write_text(json.dumps(machine))
        return uuids[:number]

    yield give
    for each in (*uuids, turn):
        gpu_lock(each).unlink(missing_ok=True)
    sys.modules.pop("pynvml", None)
