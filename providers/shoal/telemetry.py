"""Report metrics of pools and jobs with OpenTelemetry, if the environment variable OTEL_METRICS_EXPORTER names an
exporter.

The variables of OpenTelemetry's specification (``OTEL_...``) configure the exporter. While metrics are off, no module
of OpenTelemetry is imported. No error of an exporter reaches the caller. The attributes of the metrics contain the
names of pools, and no other text that a user has written.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from shoal.installation import pip_install
from shoal.secrets.redaction import has_credentials, is_secret_name

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider

log = logging.getLogger(__name__)

_EXPORTER = "OTEL_METRICS_EXPORTER"

_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""Names of OpenTelemetry's OTLP exporters by the value of OTEL_EXPORTER_OTLP_PROTOCOL."""

_FLUSH_S = 2.0
"""Longest time for which a call waits until its metrics are sent. Many task processes end without running exit
handlers, and would lose metrics that are sent only at exit."""

_BUCKETS_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600)
"""Upper limits, in seconds, of the buckets of all histograms of durations."""

_EMBEDDED = "embedded"
"""Value of the metrics' attribute `shoal.pool` for all embedded pools. The metrics do not contain the name of an
embedded pool."""

NodeCounts = Mapping[tuple[str, str], int]
"""Number of nodes by pool and state."""


def job_submitted(pool: str, framework: str) -> None:
    """Increase the count of submitted attempts of jobs."""
    if (found := _instruments()) is not None:
        found.submitted.add(1, _attributes(pool, framework))
        found.flush()


def job_queued(pool: str, framework: str, seconds: float) -> None:
    """Record how long an attempt has waited in the pool's queue. The attempt's driver calls this function when the
    driver starts."""
    if (found := _instruments()) is not None:
        found.queue.record(max(0.0, seconds), _attributes(pool, framework))


def job_ended(pool: str, framework: str, state: str, seconds: Mapping[str, float] | None = None) -> None:
    """Increase the count of ended attempts of jobs, and record the duration of each step of the attempt."""
    if (found := _instruments()) is not None:
        attributes = _attributes(pool, framework)
        found.ended.add(1, {**attributes, "shoal.job.state": state})
        for step, value in (seconds or {}).items():
            found.steps.record(value, {**attributes, "shoal.job.step": step})
        found.flush()


def nodes_awaited(pool: str, outcome: str, seconds: float) -> None:
    """Record how long a call has waited for a pool to reach the requested size."""
    if (found := _instruments()) is not None:
        found.capacity.record(seconds, {"shoal.pool": _pool(pool), "shoal.operation.state": outcome})
        found.flush()


def follow_nodes(counts: Callable[[], NodeCounts]) -> None:
    """Report the number of nodes in each export of metrics, until this process ends."""
    if (found := _instruments()) is None:
        return
    from opentelemetry.metrics import Observation

    known: dict[tuple[str, str], int] = {}

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        # A state that was reported once is reported in all later exports, too: with 0 if no node has this state.
        known.update(dict.fromkeys(known, 0))
        for (pool, state), count in counts().items():
            key = (_pool(pool), state)
            known[key] = known.get(key, 0) + count
        return [
            Observation(count, {"shoal.pool": pool, "shoal.node.state": state})
            for (pool, state), count in known.items()
        ]

    found.meter.create_observable_gauge("shoal.nodes", [observe], "{node}", "Nodes of the pools of this host")


def settings() -> dict[str, str]:
    """Return the OpenTelemetry environment variables of this process, so that the caller can pass them to the processes
    of a pool. Variables that contain credentials are left out.

    Variables with HTTP headers are left out, because headers usually contain credentials.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("OTEL_") and not (name.endswith("HEADERS") or is_secret_name(name) or has_credentials(value))
    }


class _Instruments:
    """OpenTelemetry instruments with the metrics of this process."""

    def __init__(self, provider: MeterProvider) -> None:
        self.provider = provider
        self.meter = meter = provider.get_meter("shoal")
        self.submitted: Counter = meter.create_counter(
            "shoal.jobs.submitted", "{job}", "Attempts of jobs that were submitted"
        )
        self.ended: Counter = meter.create_counter("shoal.jobs.ended", "{job}", "Attempts of jobs that have ended")
        self.queue = self._duration(meter, "shoal.job.queue.duration", "Time of an attempt in the pool's queue")
        self.steps = self._duration(meter, "shoal.job.step.duration", "Time of a step of a job that has succeeded")
        self.capacity = self._duration(meter, "shoal.pool.wait.duration", "Time of a call that waited for nodes")
        self._sending: threading.Thread | None = None

    def flush(self) -> None:
        """Send the metrics now, and wait up to `_FLUSH_S` seconds until they are sent."""
        if self._sending is not None and self._sending.is_alive():
            return  # The thread of the previous call still waits for the receiver. Do not start another thread.
        self._sending = threading.Thread(target=self.provider.force_flush, name="shoal-telemetry", daemon=True)
        self._sending.start()
        self._sending.join(_FLUSH_S)

    @staticmethod
    def _duration(meter: Meter, name: str, description: str) -> Histogram:
        return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=_BUCKETS_S)


def _instruments() -> _Instruments | None:
    """Return the metrics of this process; None if metrics are off."""
    exporter = os.environ.get(_EXPORTER, "").strip()
    if exporter in ("", "none") or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    return _started(exporter)


@functools.cache
def _started(exporter: str) -> _Instruments | None:
    try:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
    except ImportError:
        log.warning("%s=%s, but OpenTelemetry's SDK is not installed: run %s", _EXPORTER, exporter, pip_install("otel"))
        return None
    # If the application has configured OpenTelemetry itself, the metrics go to the application's exporter.
    provider = metrics.get_meter_provider()
    if not isinstance(provider, MeterProvider):
        try:
            provider = _provider(exporter)
        # All types of exceptions are caught, because each exporter raises exceptions of its own types.
        except Exception as error:
            log.warning("%s=%s: no metrics are sent: %s", _EXPORTER, exporter, error)
            return None
    return _Instruments(provider)


def _provider(exporter: str) -> MeterProvider:
    from importlib.metadata import entry_points

    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    name = exporter
    if exporter == "otlp":
        protocols = [f"OTEL_EXPORTER_OTLP_{kind}PROTOCOL" for kind in ("METRICS_", "")]
        protocol = next(filter(None, map(os.environ.get, protocols)), "http/protobuf")
        if protocol not in _OTLP:
            raise ValueError(f"the protocol {protocol} is not supported: use {' or '.join(_OTLP)}")
        name = _OTLP[protocol]
    found = list(entry_points(group="opentelemetry_metrics_exporter", name=name))
    kind = found[0].load() if found else None
    if not isinstance(kind, type) or not issubclass(kind, MetricExporter):
        raise ValueError(f'no metrics exporter "{name}" is installed: use otlp ({pip_install("otel")}) or console')
    # Each process counts from 0. Because of the separate instance id, the receiver does not confuse the counts of this
    # process with the counts of an earlier process.
    attributes = {"service.instance.id": str(uuid.uuid4())}
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = "shoal"
    return MeterProvider([PeriodicExportingMetricReader(kind())], Resource.create(attributes))


def _attributes(pool: str, framework: str) -> dict[str, str]:
    return {"shoal.pool": _pool(pool), "shoal.job.framework": framework}


def _pool(name: str) -> str:
    return _EMBEDDED if name.startswith(f"{_EMBEDDED}-") else name
