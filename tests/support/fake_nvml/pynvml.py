"""A machine with GPUs where there is none: the answers of `nvidia-ml-py`, from the file `machine.json` beside it.

A folder with a copy of this module stands on PYTHONPATH before the real one (`tests.support.gpu_machine`), so that the
processes that a test starts see the machine as well. Like NVML, it counts `nvmlInit` and `nvmlShutdown`, and refuses
what NVML refuses: calls before the first or after the last of them, an index or MIG part that does not exist, the MIG
mode of a GPU that has none, and a GPU that has fallen off the bus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MACHINE = Path(__file__).with_name("machine.json")
_opened = 0


class NVMLError(Exception):
    """Base class of what NVML refuses."""


class NVMLError_Uninitialized(NVMLError):
    """No `nvmlInit`, or as many `nvmlShutdown` since."""


class NVMLError_DriverNotLoaded(NVMLError):
    """The machine has no driver."""


class NVMLError_InvalidArgument(NVMLError):
    """There is no such GPU, or the handle is not that of a GPU."""


class NVMLError_NotSupported(NVMLError):
    """The GPU cannot do this."""


class NVMLError_NotFound(NVMLError):
    """The GPU has no such part."""


class NVMLError_GpuIsLost(NVMLError):
    """The GPU has fallen off the bus."""


@dataclass(frozen=True)
class _Handle:
    gpu: int
    part: int | None = None


@dataclass(frozen=True)
class _Process:
    pid: int
    usedGpuMemory: int = 2**30


def nvmlInit() -> None:
    global _opened
    if not _read()["driver"]:
        raise NVMLError_DriverNotLoaded
    _opened += 1


def nvmlShutdown() -> None:
    global _opened
    _gpus()
    _opened -= 1


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:
    if index not in range(len(_gpus())):
        raise NVMLError_InvalidArgument
    if _gpus()[index]["lost"]:
        raise NVMLError_GpuIsLost
    return _Handle(index)


def nvmlDeviceGetMigMode(handle: _Handle) -> list[int]:
    parts = _whole(handle)["parts"]
    if parts is None:
        raise NVMLError_NotSupported
    return [1, 1] if parts else [0, 0]


def nvmlDeviceGetMaxMigDeviceCount(handle: _Handle) -> int:
    return 7 if _whole(handle)["parts"] is not None else 0


def nvmlDeviceGetMigDeviceHandleByIndex(handle: _Handle, index: int) -> _Handle:
    if index not in range(7):
        raise NVMLError_InvalidArgument
    if index not in range(len(_whole(handle)["parts"] or [])):
        raise NVMLError_NotFound
    return _Handle(handle.gpu, index)


def nvmlDeviceGetUUID(handle: _Handle) -> str:
    gpu = _gpus()[handle.gpu]
    return str(gpu["uuid"] if handle.part is None else gpu["parts"][handle.part])


def nvmlDeviceGetComputeRunningProcesses(handle: _Handle) -> list[_Process]:
    pids = _gpus()[handle.gpu]["pids"]
    if pids is None:
        raise NVMLError_NotSupported
    return [_Process(pid) for pid in pids]


def _whole(handle: _Handle) -> dict[str, Any]:
    if handle.part is not None:
        raise NVMLError_InvalidArgument
    return _gpus()[handle.gpu]


def _gpus() -> list[dict[str, Any]]:
    if not _opened:
        raise NVMLError_Uninitialized
    gpus: list[dict[str, Any]] = _read()["gpus"]
    return gpus


def _read() -> dict[str, Any]:
    machine: dict[str, Any] = json.loads(_MACHINE.read_text())
    return machine
