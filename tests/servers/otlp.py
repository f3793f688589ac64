"""A receiver of OTLP over HTTP: it stores what is sent to it, and decodes it on request."""

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
    """The fields of a span that tests use; ids are in hexadecimal, and the parent of a root is empty."""

    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str


@contextmanager
def run_receiver() -> Iterator[tuple[dict[str, list[bytes]], str]]:
    """Yield the received bodies by path, and the address of the receiver."""
    bodies_by_path = defaultdict(list)

    class RequestHandler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies_by_path[self.path].append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), RequestHandler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield bodies_by_path, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def get_string_attributes(resource) -> dict[str, str]:
    return {one.key: one.value.string_value for one in resource.attributes}


def decode_spans(bodies: list[bytes]) -> list[Span]:
    """Return all spans that were sent in *bodies*."""
    decoded = []
    for part in (part for body in bodies for part in ExportTraceServiceRequest.FromString(body).resource_spans):
        resource_attributes = get_string_attributes(part.resource)
        decoded += [
            Span(
                span.name,
                resource_attributes["service.name"],
                resource_attributes["service.instance.id"],
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
            )
            for scope in part.scope_spans
            for span in scope.spans
        ]
    return decoded
