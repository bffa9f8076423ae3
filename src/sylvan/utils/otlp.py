"""Sends spans to a collector over OTLP, in a separate thread; needs the extra `trace`.

A collector that hangs or is unreachable loses spans, but never delays requests: spans wait in a
bounded queue, and are dropped when it is full.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from sylvan.utils.clock import monotonic

EXPORT_S = 5
"""Timeout for sending one batch of spans, in seconds."""
CLOSE_S = 8.0
"""Timeout for sending the remaining spans when the process exits, in seconds."""
QUEUE_SPANS = 16384
_BATCH_SPANS = 1024
_DELAY_MS = 1000
_POLL_S = 0.02


def span_processor(endpoint: str) -> BatchSpanProcessor:
    """Return a processor that sends finished spans in batches.

    Args:
        endpoint: URL of the collector, `http://` or `https://` (TLS): `http://HOST:PORT` uses gRPC;
            with a path, such as `/v1/traces`, HTTP.

    Raises:
        ImportError: A package is not installed.
    """
    logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)  # else a line for each drop
    # else several for each malformed `tracestate` of a client
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
    return BatchSpanProcessor(
        _exporter(endpoint),
        max_queue_size=QUEUE_SPANS,
        schedule_delay_millis=_DELAY_MS,
        max_export_batch_size=_BATCH_SPANS,
    )


async def close(processor: BatchSpanProcessor) -> None:
    """Send the remaining spans; give up after `CLOSE_S` if the collector hangs."""
    ending = threading.Thread(target=processor.shutdown, name="close-traces", daemon=True)
    ending.start()
    until_s = monotonic() + CLOSE_S
    while ending.is_alive():
        if monotonic() > until_s:
            logging.getLogger(__name__).warning("the trace collector hangs; spans are lost")
            return
        await asyncio.sleep(_POLL_S)


def _exporter(endpoint: str) -> SpanExporter:
    if urlsplit(endpoint).path.strip("/"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint, timeout=EXPORT_S)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

    secure = endpoint.startswith("https://")
    return Grpc(endpoint=endpoint, insecure=not secure, timeout=EXPORT_S)
