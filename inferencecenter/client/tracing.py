"""Where the caller's trace is now, for a turn to belong to it."""

from __future__ import annotations

import sys


def current_traceparent() -> str | None:
    """Return the current span as W3C Trace Context has it; ``None`` where there is none.

    OpenTelemetry is not imported: in a program that has a span, it is there.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 0xFF:02x}"
