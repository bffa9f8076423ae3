"""Traces reach a collector over OTLP, and continue at the workers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

from sylvan.protocol.messages import Finish
from sylvan.utils import otlp as otlp_export
from tests.support.cluster import gateway, scripted, until
from tests.support.scripted import write_checkpoint

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "tracestate": "vendor=1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@asynccontextmanager
async def collector(instead=None):
    """A server that keeps the spans that it is sent, or handles calls by `instead`."""
    spans = []

    async def export(data, rpc):
        request = otlp.ExportTraceServiceRequest.FromString(data)
        spans.extend(
            span
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        )
        return otlp.ExportTraceServiceResponse().SerializeToString()

    handlers = {"Export": grpc.unary_unary_rpc_method_handler(instead or export)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}", spans
    finally:
        await server.stop(0)


def traced(endpoint):
    return {"observe__trace": True, "observe__trace_endpoint": endpoint}


def attributes(span):
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


async def test_spans_join_those_of_clients_and_workers(checkpoint):
    async with collector() as (endpoint, spans), scripted(checkpoint) as worker:
        async with gateway(worker.url, **traced(endpoint)) as front:
            body = {"prompt": "x"}
            await front.post("/v1/completions", body, headers=PARENT)
            await front.post("/v1/completions", body)
            await front.get("/v1/models")
        joined, fresh = spans
        assert joined.name == "POST /v1/completions"
        assert joined.trace_id.hex() == TRACE
        assert joined.parent_span_id.hex() == "00f067aa0ba902b7"
        assert fresh.trace_id.hex() != TRACE
        assert attributes(joined)["http.response.status_code"] == 200
        assert attributes(joined)["http.route"] == "/v1/completions"
        first, second = worker.paths("/v1/completions")
        assert first["traceparent"] == f"00-{TRACE}-{joined.span_id.hex()}-01"
        assert first["tracestate"] == "vendor=1"
        assert second["traceparent"].split("-")[1:3] == [fresh.trace_id.hex(), fresh.span_id.hex()]


async def test_attempts_are_events(checkpoint):
    async with (
        collector() as (endpoint, spans),
        scripted(checkpoint) as lost,
        scripted(checkpoint) as good,
    ):
        settings = traced(endpoint) | {"routing__policy": "round_robin"}
        async with gateway(lost.url, good.url, **settings) as front:
            lost.engine.control.fail = Finish(type="abort", message="full", status=503)
            for _ in range(2):
                reply = await front.post("/v1/completions", {"prompt": "x"})
                assert reply.status_code == 200
        found = [(event.name, attributes(event)) for span in spans for event in span.events]
        assert ("failure", {"worker": lost.url, "kind": "status"}) in found
        assert ("dispatch", {"worker": good.url}) in found


async def test_without_a_trace_the_clients_headers_continue(checkpoint):
    async with scripted(checkpoint) as worker, gateway(worker.url) as front:
        await front.post("/v1/completions", {"prompt": "x"}, headers=PARENT)
        [headers] = worker.paths("/v1/completions")
        assert {name: headers[name] for name in PARENT} == PARENT


@pytest.mark.slow
async def test_a_collector_that_is_away_costs_no_request(checkpoint):
    async with (
        scripted(checkpoint) as worker,
        gateway(worker.url, **traced("http://127.0.0.1:9")) as front,
    ):
        for _ in range(3):
            assert (await front.post("/v1/completions", {"prompt": "x"})).status_code == 200


async def test_a_collector_that_hangs_costs_spans_only(checkpoint, monkeypatch):
    """It accepts calls and never answers: requests continue, and the gateway exits."""
    monkeypatch.setattr(otlp_export, "CLOSE_S", 0.2)
    monkeypatch.setattr(otlp_export, "QUEUE_SPANS", 1024)
    asked, may_end = asyncio.Event(), asyncio.Event()

    async def export(data, rpc):
        asked.set()
        await may_end.wait()
        return b""

    async with collector(export) as (endpoint, spans), scripted(checkpoint) as worker:
        async with gateway(worker.url, **traced(endpoint)) as front:
            assert (await front.post("/v1/completions", {"prompt": "x"})).status_code == 200
            async with asyncio.timeout(60):
                await asked.wait()  # from here on it hangs
            for _ in range(20):
                assert (await front.post("/v1/completions", {"prompt": "x"})).status_code == 200
            assert (await front.get("/readiness")).status_code == 200
        may_end.set()
        assert spans == []


async def test_a_malformed_trace_begins_a_new_one(checkpoint):
    async with collector() as (endpoint, spans), scripted(checkpoint) as worker:
        async with gateway(worker.url, **traced(endpoint)) as front:
            headers = {"traceparent": "00-zz-1-01"}
            reply = await front.post("/v1/completions", {"prompt": "x"}, headers=headers)
            assert reply.status_code == 200
        await until(lambda: len(spans) == 1)
        assert spans[0].parent_span_id == b""
