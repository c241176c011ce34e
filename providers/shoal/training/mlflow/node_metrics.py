"""Measure whole nodes with MLflow's own collectors of system metrics, in one process per node.

MLflow itself measures a node only if user code starts an MLflow run on the node, and then once per rank that starts a
run. shoal measures in separate processes, so that the workers do not have to import MLflow.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from shoal.training.context import say
from shoal.training.timeouts import USAGE_PERIOD_S

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
            try:
                self._monitors.append(gpu_monitor())
                break
            except Exception:
                # The node has no GPUs of this manufacturer, or the manufacturer's Python package is not installed.
                # MLflow itself does not measure such GPUs either.
                continue
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
        import ray
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
        import ray

        self._ended.set()
        for actor in self._actors.values():
            # This call fails if Ray is already shut down. The error is ignored, because the actor has then ended, too.
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._thread.join(_END_SECONDS)

    def _collect(self) -> None:
        import ray

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
