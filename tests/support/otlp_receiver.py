"""A receiver of metrics over OTLP, as a collector is one: an HTTP server that reads OpenTelemetry's protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


@dataclass(frozen=True)
class Point:
    """One value of a metric: sum of a counter, number of values of a histogram, or value of a gauge."""

    name: str
    unit: str
    attributes: dict[str, str]
    value: float
    instance: str
    """Id of the process that has sent it."""


@dataclass
class Receiver:
    """What has been received.

    Attributes:
        points: The values, in the order of their arrival.
        bodies: The requests as they came.
        answers: Whether requests are answered; to be cleared and set by tests.
    """

    url: str = ""
    points: list[Point] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)

    def of(self, name: str) -> list[Point]:
        """The values of one metric, the latest of each process and each set of attributes."""
        found = {(each.instance, *sorted(each.attributes.items())): each for each in self.points if each.name == name}
        return list(found.values())

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                kind = metric.WhichOneof("data")
                for point in getattr(metric, kind).data_points:
                    attributes = {each.key: each.value.string_value for each in point.attributes}
                    value = point.count if kind == "histogram" else point.as_int or point.as_double
                    self.points.append(Point(metric.name, metric.unit, attributes, value, about["service.instance.id"]))


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A receiver on a port of its own."""
    received = Receiver()
    received.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            received.answers.wait()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    received.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield received
    finally:
        received.answers.set()
        server.shutdown()
        server.server_close()
