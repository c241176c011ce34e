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
from tests.support.gpu_report import REPLACED, replaced

FAKE = Path(__file__).with_name("fake_nvml") / "pynvml.py"

RECORDINGS = FAKE.with_name("recordings")
"""Reports from machines with GPUs."""

MOST = 16
"""Largest number of GPUs of the machine."""

Machine = Callable[..., list[str]]


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A function that gives this machine a number of GPUs, or those of a report, and returns their UUIDs.

    Its keyword arguments: `driver=False` for a machine without one, and by the GPU's number the ids of the processes
    that use it (`pids`; None if NVML does not report them), the UUIDs of its MIG parts (`parts`), and GPUs that have
    fallen off the bus (`lost`). `report` is the file that `make gpu-report` wrote on another machine. The UUIDs end at
    random, because all test runs of this user share the lock files.
    """
    folder = tmp_path / "fake-nvml"
    folder.mkdir()
    end = str(uuid.uuid4())[len("00000000") :]
    uuids = [replaced("GPU", number).replace(REPLACED, end) for number in range(MOST)]
    shutil.copy(FAKE, folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Other test runs of this user have their turns at the same time.
    turn = f"embedded-{uuids[0]}"
    monkeypatch.setattr(gpus, "gpu_lock", lambda name: gpu_lock(turn if name == "embedded" else name))

    def give(
        number: int = 0,
        *,
        driver: bool = True,
        pids: dict[int, list[int] | None] | None = None,
        parts: dict[int, list[str]] | None = None,
        lost: Sequence[int] = (),
        report: Path | None = None,
    ) -> list[str]:
        def answers(gpu: int) -> dict[str, Any] | str:
            if gpu in lost:
                return "NVMLError_GpuIsLost"
            used, mine = (pids or {}).get(gpu, []), (parts or {}).get(gpu)
            processes = {
                "nvmlDeviceGetComputeRunningProcesses": "NVMLError_NotSupported"
                if used is None
                else [{"pid": pid, "usedGpuMemory": 2**30} for pid in used]
            }
            return {
                "nvmlDeviceGetUUID": uuids[gpu],
                **processes,
                "nvmlDeviceGetUtilizationRates": {"gpu": 70, "memory": 10},
                "nvmlDeviceGetMigMode": "NVMLError_NotSupported" if mine is None else [int(bool(mine))] * 2,
                "nvmlDeviceGetMaxMigDeviceCount": 0 if mine is None else 7,
                "parts": [{"nvmlDeviceGetUUID": part, **processes} for part in mine or ()],
            }

        text = json.dumps({"driver": "580.65.06" if driver else None, "gpus": [answers(gpu) for gpu in range(number)]})
        text = report.read_text().replace(REPLACED, end) if report else text
        (folder / "machine.json").write_text(text)
        return uuids[: len(json.loads(text)["gpus"])]

    yield give
    for each in (*uuids, turn):
        gpu_lock(each).unlink(missing_ok=True)
    sys.modules.pop("pynvml", None)
