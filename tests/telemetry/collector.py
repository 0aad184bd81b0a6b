"""A trace collector on the loopback: receives OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

WAIT_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as received; ids are hex, times Unix nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]


@dataclass
class Collector:
    """Answers with ``status``; ``spans`` are all received spans, ``headers`` those of the latest request."""

    status: int = 200
    spans: list[ReceivedSpan] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    _came: threading.Condition = field(default_factory=threading.Condition)
    _server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        """The collector's address."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def wait(self, done: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Block until the spans satisfy a condition, and return them."""
        with self._came:
            assert self._came.wait_for(lambda: done(self.spans), WAIT_S), self.spans
            return list(self.spans)

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Record a request, and return the status of its answer."""
        with self._came:
            self.headers = headers
            self.bodies.append(body)
            self.paths.append(path)
            if self.status == 200:
                self.spans += _spans(body)
            self._came.notify_all()
            return self.status

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(collector.receive(self.path, headers, body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    return Handler


def _spans(body: bytes) -> list[ReceivedSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        ReceivedSpan(
            service=_values(group.resource.attributes)["service.name"],
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            began_ns=span.start_time_unix_nano,
            ended_ns=span.end_time_unix_nano,
            failed=span.status.code == span.status.STATUS_CODE_ERROR,
            attributes=_values(span.attributes),
            events=tuple(event.name for event in span.events),
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _values(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
