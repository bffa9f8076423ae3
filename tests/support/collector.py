"""A trace collector: a server that accepts OTLP over gRPC and HTTP, and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Span:
    """A received span.

    Attributes:
        process: Its resource: service and process.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    seconds: float
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    process: tuple[str, str]


@dataclass
class Collected:
    """Received spans."""

    grpc_url: str = ""
    http_url: str = ""
    spans: list[Span] = field(default_factory=list)
    hangs: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def take(self, data: bytes) -> bytes:
        """Add the spans of a request."""
        if self.hangs.is_set():
            self.may_go_on.wait(60)
        request = otlp.ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            own = _attributes(resource.resource.attributes)
            process = own.get("service.name", ""), own.get("sylvan.process", "")
            for scope in resource.scope_spans:
                self.spans += [_span(span, process) for span in scope.spans]
        return otlp.ExportTraceServiceResponse().SerializeToString()


@contextmanager
def collector() -> Iterator[Collected]:
    """Start both servers on free ports of this machine."""
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            good = self.path == "/v1/traces"
            answer = collected.take(data) if good else b""
            self.send_response(200 if good else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    handlers = {
        "Export": grpc.unary_unary_rpc_method_handler(lambda data, rpc: collected.take(data))
    }
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    collected.grpc_url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    collected.http_url = f"http://127.0.0.1:{http.server_address[1]}/v1/traces"
    server.start()
    try:
        yield collected
    finally:
        collected.may_go_on.set()
        http.shutdown()
        http.server_close()
        thread.join()
        server.stop(None).wait(10)


def _span(span: Any, process: tuple[str, str]) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        process=process,
    )


def _attributes(found: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in found}
