"""Measure the CPU, memory and GPU usage of a worker's process, while user code runs in it.

MLflow's own system metrics measure the whole host, which says little about a worker that shares the host with others.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from shoal.training.timeouts import USAGE_PERIOD_S

USAGE_NOTE = "usage"
"""Key of the notes with which workers send their usage to the driver."""

_MEGABYTE = 1e6
"""Bytes in a megabyte, the unit of MLflow's system metrics."""


@contextlib.contextmanager
def measured(gpus: Sequence[str], report: Callable[[dict[str, float]], None]) -> Iterator[None]:
    """Measure this process and its child processes every 10 s, and once more at the end of the ``with`` block."""
    meter = Meter(gpus)
    ended = threading.Event()

    def measure() -> None:
        while not ended.wait(USAGE_PERIOD_S):
            report(meter.measure())

    thread = threading.Thread(target=measure, name="shoal-usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        report(meter.measure())
        meter.close()


class Meter:
    """Meter for the CPU, memory and GPU usage of this process.

    Args:
        gpus: GPUs of this worker: indexes, or UUIDs.
    """

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self._process = psutil.Process()
        self._gpus = _Gpus(gpus)
        self._at, self._cpu_seconds = time.monotonic(), self._cpu_time(self._family())

    def measure(self) -> dict[str, float]:
        """Measure the present usage of CPU, memory and GPUs; the CPU usage is the mean since the last call.

        Returns:
            Dict of values by name. ``cpu_utilization_percentage`` (100 is one CPU) and ``memory_usage_megabytes``
            (resident memory) count this process and its child processes. The GPUs are numbered from 0.
            ``gpu_0_utilization_percentage`` counts all processes on the GPU, and ``gpu_0_memory_usage_megabytes`` only
            this process and its child processes. Values that cannot be measured are left out.
        """
        family = self._family()
        now, cpu_seconds = time.monotonic(), self._cpu_time(family)
        # The CPU time of a child that has just ended may not be counted yet. The total CPU time may then be slightly
        # less than at the last call, and the usage counts as 0.
        used = max(0.0, cpu_seconds - self._cpu_seconds) / max(now - self._at, 1e-3)
        self._at, self._cpu_seconds = now, cpu_seconds
        memory = 0
        for process in family:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
        return {
            "cpu_utilization_percentage": round(100 * used, 1),
            "memory_usage_megabytes": round(memory / _MEGABYTE, 1),
            **self._gpus.measure({process.pid for process in family}),
        }

    def close(self) -> None:
        """Shut down NVML, NVIDIA's management library."""
        self._gpus.close()

    def _family(self) -> list[psutil.Process]:
        """Return this process and its child processes, such as those of a PyTorch DataLoader."""
        return [self._process, *self._process.children(recursive=True)]

    def _cpu_time(self, family: Sequence[psutil.Process]) -> float:
        """Return the CPU seconds of the given processes and of the ended child processes of this process."""
        ended = self._process.cpu_times()
        seconds = ended.children_user + ended.children_system
        for process in family:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system
        return float(seconds)


class _Gpus:
    """GPUs of a worker, measured with NVML (the package nvidia-ml-py). Without NVML, GPUs are not measured."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        if not gpus:
            return
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._handles = [_handle(nvml, gpu) for gpu in gpus]
        except Exception:
            # The package, the GPU driver or a GPU is missing. The training continues, and no GPU is measured.
            self._handles = []

    def measure(self, pids: set[int]) -> dict[str, float]:
        """Measure the utilization of each GPU and the GPU memory of the given processes, and return a dict of metrics
        by name.
        """
        values: dict[str, float] = {}
        for number, handle in enumerate(self._handles):
            with contextlib.suppress(self._nvml.NVMLError):
                rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
                values[f"gpu_{number}_utilization_percentage"] = float(rates.gpu)
            with contextlib.suppress(self._nvml.NVMLError):
                own = [each for each in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle) if each.pid in pids]
                # If this container has its own process ids, NVML's process ids do not match any process in the
                # container. The GPU memory of this worker is then unknown, so this metric is left out.
                if own:
                    used = sum(each.usedGpuMemory or 0 for each in own)
                    values[f"gpu_{number}_memory_usage_megabytes"] = round(used / _MEGABYTE, 1)
        return values

    def close(self) -> None:
        """Shut down NVML, NVIDIA's management library."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


def _handle(nvml: Any, gpu: str) -> Any:
    """Return NVML's handle of a GPU.

    NVML ignores CUDA_VISIBLE_DEVICES, so an index counts all GPUs of the host.
    """
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(gpu)
