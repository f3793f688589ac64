"""A receiver of OTLP over HTTP: it keeps what is sent to it, and decodes what it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """What of a span tests look at; ids are in hexadecimal, and the parent of a root is empty."""

    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str


@contextmanager
def receiver() -> Iterator[tuple[dict[str, list[bytes]], str]]:
    """What is sent, by the path that it is sent to, and the address to send it to."""
    received = defaultdict(list)

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self):
            received[self.path].append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield received, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def attributes(resource) -> dict[str, str]:
    return {one.key: one.value.string_value for one in resource.attributes}


def spans(bodies: list[bytes]) -> list[Span]:
    """All spans that were sent in *bodies*."""
    found = []
    for part in (part for body in bodies for part in ExportTraceServiceRequest.FromString(body).resource_spans):
        whose = attributes(part.resource)
        found += [
            Span(
                span.name,
                whose["service.name"],
                whose["service.instance.id"],
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
            )
            for scope in part.scope_spans
            for span in scope.spans
        ]
    return found
