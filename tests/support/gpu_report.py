"""Write a report about this machine's GPUs into a file: `make gpu-report`.

The report has NVML's answers to the calls that shoal makes, the topology, versions, and the results of `tests/gpu`. It
has no names of hosts and users, no paths, addresses and process ids, and other UUIDs. The fake of NVML
(`tests/support/fake_nvml`) reads the same form: `gpu_machine(report=FILE)` makes a machine with the same GPUs.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import itertools
import json
import platform
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

OF_EACH = (
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetUtilizationRates",
)
"""Calls with a GPU or MIG part that shoal makes (`pool/backends/local/gpus.py`, `training/host/usage.py`)."""

ABOUT_IT = ("nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability")
"""Calls that only describe a GPU to the reader."""

REPLACED = "-0000-0000-0000-000000000000"
"""End of each UUID in a report."""

FIRST_PID = 2**22 + 1
"""First process id in a report. Linux gives none that is greater than 2^22."""

PACKAGES = (
    "shoal",
    "ray",
    "torch",
    "triton",
    "xgboost",
    "xgboost-cpu",
    "lightgbm",
    "nvidia-ml-py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)

_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PATH = re.compile(r"(?<=')/[^'\n]+|(?<=\")/[^\"\n]+|(?<![\w.>])(?:~|[a-z][a-z0-9+]*:/)?/[\w.@+~-][^\s'\",:;()\[\]]*")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){3,7}\b")
_PROCESS = re.compile(r"\b(pid|process) \d+")


def replaced(kind: str, number: int) -> str:
    """Return the UUID that a report has for a GPU ("GPU") or part ("MIG")."""
    return f"{kind}-{number:08x}{REPLACED}"


def nvml_answers() -> dict[str, Any]:
    """Return NVML's answers about this machine: `driver` (None if NVML cannot be used), `gpus` and `topology`."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # the package or the driver is missing
        return {"driver": None, "problem": type(error).__name__, "gpus": []}
    try:
        handles = [_answer("nvmlDeviceGetHandleByIndex", index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {
            "driver": _answer("nvmlSystemGetDriverVersion"),
            "cuda": _answer("nvmlSystemGetCudaDriverVersion"),
            "gpus": [handle if isinstance(handle, str) else _whole(handle) for handle in handles],
            "topology": dict(_topology(handles)),
        }
    finally:
        pynvml.nvmlShutdown()


def _whole(handle: Any) -> dict[str, Any]:
    answers = _of(handle, (*OF_EACH, *ABOUT_IT))
    most = answers["nvmlDeviceGetMaxMigDeviceCount"]
    parts = [
        _answer("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        for number in range(most if isinstance(most, int) else 0)
    ]
    return {**answers, "parts": [part if isinstance(part, str) else _of(part, OF_EACH) for part in parts]}


def _of(handle: Any, calls: tuple[str, ...]) -> dict[str, Any]:
    return {name: _plain(_answer(name, handle)) for name in calls}


def _answer(call: str, *args: Any) -> Any:
    """Return NVML's answer to a call, or the name of its error."""
    import pynvml

    try:
        return getattr(pynvml, call)(*args)
    except (pynvml.NVMLError, AttributeError) as error:
        return type(error).__name__


def _plain(answer: Any) -> Any:
    """Return NVML's structures as dicts, as JSON has them."""
    if isinstance(answer, (list, tuple)):
        return [_plain(each) for each in answer]
    if names := [name for name, *_ in getattr(answer, "_fields_", ())]:
        return {name: getattr(answer, name) for name in names}
    return dict(vars(answer)) if hasattr(answer, "__dict__") else answer


def _topology(handles: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each two GPUs the level of what connects them (NVML's number), and whether NVLink does (0: yes)."""
    for (a, first), (b, second) in itertools.combinations(enumerate(handles), 2):
        if not isinstance(first, str) and not isinstance(second, str):
            yield (
                f"{a}-{b}",
                {
                    "level": _answer("nvmlDeviceGetTopologyCommonAncestor", first, second),
                    "nvlink": _answer("nvmlDeviceGetP2PStatus", first, second, 2),
                },
            )


def versions() -> dict[str, Any]:
    """Return the versions of what trains on GPUs, and of the CUDA that each library was built for."""
    found: dict[str, Any] = {"python": platform.python_version(), "system": f"{sys.platform} {platform.machine()}"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        import torch

        found["CUDA of torch"], found["torch uses CUDA"] = torch.version.cuda, torch.cuda.is_available()
        found["NCCL of torch"] = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    except ImportError:
        pass
    try:
        import xgboost

        found["CUDA of xgboost"] = xgboost.build_info().get("CUDA_VERSION")
    except ImportError:
        pass
    return found


class TestLines:
    """Plugin of pytest that keeps a line for each test: its name, result, seconds, and the reason or error."""

    __test__ = False

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the result of a test, and of a set-up or teardown only if it decides the result."""
        if report.when != "call" and report.outcome == "passed":
            return
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else _errors(report.longreprtext)
        line = {
            "test": report.nodeid.rpartition("/")[2],
            "result": report.outcome,
            "seconds": round(report.duration, 1),
        }
        self.lines.append(line | ({"why": why} if why else {}))


def _errors(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("E  "))[:2000]


def without_identity(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with other UUIDs and process ids, and without hosts, users, paths and addresses."""
    names: dict[str, str] = {}
    for number, gpu in enumerate(report["gpus"]):
        if isinstance(gpu, dict):
            names[gpu["nvmlDeviceGetUUID"]] = replaced("GPU", number)
            for index, part in enumerate(gpu["parts"]):
                if isinstance(part, dict):
                    names[part["nvmlDeviceGetUUID"]] = replaced("MIG", 256 * (number + 1) + index)
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(KeyError, OSError):  # a user without a name
        own.add(getpass.getuser())
    known = "|".join(map(re.escape, sorted(own - {"root", "localhost", ""}, key=len, reverse=True)))
    own_names = re.compile(rf"\b(?:{known})\b(?:\.[\w-]+)*") if known else None
    pids = itertools.count(FIRST_PID)

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: next(pids) if key == "pid" else cleaned(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [cleaned(each) for each in value]
        if not isinstance(value, str):
            return value
        value = _UUID.sub(lambda found: names.get(found[0], "<UUID>"), value)
        value = _ADDRESS.sub("<address>", _PROCESS.sub(r"\1 <number>", _PATH.sub("<path>", value)))
        return own_names.sub("<name>", value) if own_names else value

    return dict(cleaned(report))


def write(file: Path, tests: list[dict[str, Any]]) -> None:
    """Write the report about this machine, with lines about tests (see `TestLines`)."""
    report = {**nvml_answers(), "versions": versions(), "tests": tests}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(without_identity(report), indent=1) + "\n")


if __name__ == "__main__":
    lines = TestLines()
    pytest.main(["-m", "gpu", "tests/gpu"], plugins=[lines])
    write(Path(sys.argv[1]), lines.lines)
    print(f"wrote {sys.argv[1]}: attach it to the issue, after a look at it")
