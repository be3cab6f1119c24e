"""Traces requests with OpenTelemetry, if its package is installed and set up; otherwise does nothing.

Each request is one span, a child of the client's span (header traceparent). The package's environment variables
(OTEL_...) and its start-up code say where the spans are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = propagate = None  # type: ignore[assignment]


@contextmanager
def span(path: str, record: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> Iterator[None]:
    """Trace the `with` block as one span. The items of the request's log entry become attributes of the span."""
    if trace is None or propagate is None:
        yield
        return
    carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
    tracer = trace.get_tracer("forerun.serve")
    context = propagate.extract(carrier)
    with tracer.start_as_current_span(path, context, trace.SpanKind.SERVER) as current:
        yield
        for name, value in record.items():
            current.set_attribute(f"forerun.{name}", value)
