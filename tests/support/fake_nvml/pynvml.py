"""A machine with GPUs where there is none: the answers of `nvidia-ml-py`, from the file `machine.json` beside it.

A folder with a copy of this module stands on PYTHONPATH before the real one (`tests.support.gpu_machine`), so that
the processes that a test starts see the machine as well. The file has the form of a report
(`tests.support.gpu_report`): for each GPU and MIG part, the answers or names of errors by the name of the call. Like
NVML, this module counts `nvmlInit` and `nvmlShutdown`, and refuses calls before the first or after the last of them,
and GPUs and parts that do not exist. A call without a recorded answer is not supported.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_MACHINE = Path(__file__).with_name("machine.json")
_opened = 0

_Handle = dict[str, Any]
"""The answers of a GPU or part."""


class NVMLError(Exception):
    """Base class of what NVML refuses."""


def nvmlInit() -> None:
    global _opened
    if _read()["driver"] is None:
        _refuse("NVMLError_DriverNotLoaded")
    _opened += 1


def nvmlShutdown() -> None:
    global _opened
    _machine()
    _opened -= 1


def nvmlSystemGetDriverVersion() -> str:
    return str(_machine()["driver"])


def nvmlDeviceGetCount() -> int:
    return len(_machine()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:
    return _handle(_machine()["gpus"], index, "NVMLError_InvalidArgument")


def nvmlDeviceGetMigDeviceHandleByIndex(whole: _Handle, index: int) -> _Handle:
    _machine()
    return _handle(whole["parts"], index, "NVMLError_NotFound")


def nvmlDeviceGetHandleByUUID(uuid: str) -> _Handle:
    gpus = [gpu for gpu in _machine()["gpus"] if isinstance(gpu, dict)]
    for each in (*gpus, *(part for gpu in gpus for part in gpu["parts"])):
        if isinstance(each, dict) and each["nvmlDeviceGetUUID"] == uuid:
            return dict(each)
    _refuse("NVMLError_NotFound")


def __getattr__(name: str) -> Callable[..., Any]:
    """Any call that asks a GPU or part, such as `nvmlDeviceGetUUID`."""
    if not name.startswith("nvmlDeviceGet"):
        raise AttributeError(name)

    def answer(handle: _Handle, *others: Any) -> Any:
        _machine()
        recorded = handle.get(name, "NVMLError_NotSupported")
        if isinstance(recorded, str) and recorded.startswith("NVMLError_"):
            _refuse(recorded)
        return _object(recorded)

    return answer


def _object(recorded: Any) -> Any:
    if isinstance(recorded, dict):
        return SimpleNamespace(**recorded)
    return [_object(each) for each in recorded] if isinstance(recorded, list) else recorded


def _handle(answers: list[Any], index: int, error: str) -> _Handle:
    found = answers[index] if index in range(len(answers)) else error
    return _refuse(found) if isinstance(found, str) else dict(found)


def _refuse(name: str) -> Any:
    raise type(name, (NVMLError,), {})(name)


def _machine() -> dict[str, Any]:
    if not _opened:
        _refuse("NVMLError_Uninitialized")
    return _read()


def _read() -> dict[str, Any]:
    machine: dict[str, Any] = json.loads(_MACHINE.read_text())
    return machine
