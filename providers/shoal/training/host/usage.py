"""Measure what a training uses: each worker's process, and whole nodes with MLflow's own collectors.

MLflow's own system metrics measure the whole host, which says little about a worker that shares the host with others,
and only if user code starts an MLflow run on the node, once per rank that does. shoal measures nodes in separate
processes, so that the workers do not have to import MLflow."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from shoal.lazy_imports import ray
from shoal.training.host.own_process import repeating
from shoal.training.reporting import say
from shoal.training.timeouts import USAGE_PERIOD_S

USAGE_NOTE = "usage"
"""Key of the notes with which workers send their usage to the driver."""

_MEGABYTE = 1e6
"""Bytes in a megabyte, the unit of MLflow's system metrics."""


@contextlib.contextmanager
def measured(gpus: Sequence[str], report: Callable[[dict[str, float]], None]) -> Iterator[None]:
    """Measure this process and its child processes every 10 s, and once more at the end of the ``with`` block."""
    meter = Meter(gpus)
    try:
        with repeating(lambda: report(meter.measure()), USAGE_PERIOD_S, "shoal-usage"):
            yield
    finally:
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
        # If the package, the GPU driver or a GPU is missing, the training continues, and no GPU is measured.
        with contextlib.suppress(Exception):
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            # NVML ignores CUDA_VISIBLE_DEVICES, so an index counts all GPUs of the host.
            by_index, by_id = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            self._handles = [by_index(int(gpu)) if gpu.isdecimal() else by_id(gpu) for gpu in gpus]

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


_END_SECONDS = 5.0
"""Maximum time in seconds to wait for the end of the thread. The thread usually ends at once, because its calls to
killed actors fail at once."""


class Collectors:
    """Ray actor that measures its node with MLflow's collectors: CPU, memory, disk, network and GPUs."""

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
        from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

        self._monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        for gpu_monitor in (GPUMonitor, ROCMMonitor):
            # The node may have no GPUs of this manufacturer, or not the manufacturer's Python package. MLflow itself
            # does not measure such GPUs either.
            with contextlib.suppress(Exception):
                self._monitors.append(gpu_monitor())
                break
        # psutil measures the CPU usage since its previous call, so the first value is always 0. This call discards the
        # first value.
        self.measure()

    def measure(self) -> dict[str, float]:
        """Measure this node, and return the metrics as a dict: MLflow's name of the metric -> value."""
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return values


class NodeMetrics:
    """Thread that measures the given nodes every 10 s, until the workers of the training end.

    Args:
        nodes: Names of the nodes by Ray's node id.
        report: Function to call with the name and the metrics of a node. The function is called in this object's
            thread.
    """

    def __init__(self, nodes: Mapping[str, str], report: Callable[[str, dict[str, float]], None]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor_class = ray.remote(num_cpus=0)(Collectors)
        self._actors: dict[str, Any] = {
            name: actor_class.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node, name in nodes.items()
        }
        self._report = report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="shoal-node-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread of this object and the processes that measure the nodes."""
        self._ended.set()
        for actor in self._actors.values():
            # This call fails if Ray is already shut down. The error is ignored, because the actor has then ended, too.
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._thread.join(_END_SECONDS)

    def _collect(self) -> None:
        waiting: dict[Any, str] = {}
        actors = dict(self._actors)
        while not self._ended.is_set() and actors:
            asked = set(waiting.values())
            waiting |= {actor.measure.remote(): name for name, actor in actors.items() if name not in asked}
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=USAGE_PERIOD_S)
            for reference in ready:
                name = waiting.pop(reference)
                try:
                    self._report(name, ray.get(reference))
                except Exception as error:
                    del actors[name]
                    if not self._ended.is_set():
                        say(f"the system metrics of node {name} are no longer measured: {str(error).splitlines()[0]}")
            self._ended.wait(USAGE_PERIOD_S)
