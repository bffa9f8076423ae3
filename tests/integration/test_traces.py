"""Spans reach a collector over gRPC and over HTTP; one that hangs is not waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from sylvan.config.tree import ObserveConfig
from sylvan.protocol.messages import Finish
from sylvan.utils import otlp
from tests.support.cluster import until
from tests.support.collector import collector
from tests.support.http import Client, checkpoint, engine

__all__ = ["checkpoint", "engine"]

BODY = {"text": "abc", "sampling_params": {"max_new_tokens": 4}}


@pytest.mark.parametrize("way", ["grpc", "http"])
async def test_spans_reach_a_collector(engine, way):
    with collector() as collected:
        endpoint = collected.grpc_url if way == "grpc" else collected.http_url
        observe = ObserveConfig(trace=True, trace_endpoint=endpoint, trace_service="mine")
        client = Client(engine, observe=observe)
        assert (await client.post("/set_trace_level?level=3", {})).status_code == 200
        await client.post("/generate", {**BODY, "rid": "r"})
        engine.control.fail = Finish(type="abort", message="too late", status=503)
        await client.post("/generate", {**BODY, "rid": "failed"})
        await client.context.observing.close()
        own = {s.attributes["rid"]: s for s in collected.spans if "rid" in s.attributes}
        assert own["r"].name == "POST /generate"
        assert own["r"].kind == 2  # a server's, as the format numbers them
        assert {s.process[0] for s in collected.spans} == {"mine"}
        assert {s.process[1] for s in collected.spans} == {"api", "scheduler", "detokenizer"}
        stages = [s for s in collected.spans if s.parent_id == own["r"].span_id]
        assert stages[0].start_ns == own["r"].start_ns
        assert abs(own["r"].start_ns / 1e9 - time.time()) < 600
        assert own["failed"].attributes["gen_ai.response.finish_reasons"] == "abort"


async def test_a_malformed_state_of_a_caller_costs_neither_spans_nor_lines_of_the_log(
    engine, caplog
):
    with collector() as collected:
        observe = ObserveConfig(trace=True, trace_endpoint=collected.grpc_url)
        client = Client(engine, observe=observe)
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "tracestate": ",=;\t,a=b=,="}
        await client.post("/generate", BODY, headers=headers)
        await client.context.observing.close()
        assert {s.trace_id for s in collected.spans} == {trace}
        assert not caplog.records


async def test_a_collector_that_hangs_is_not_waited_for(engine, monkeypatch):
    monkeypatch.setattr(otlp, "CLOSE_S", 0.2)
    with collector() as collected:
        collected.hangs.set()
        observe = ObserveConfig(trace=True, trace_endpoint=collected.http_url)
        client = Client(engine, observe=observe)
        for _ in range(200):
            assert (await client.post("/generate", BODY)).status_code == 200
        await client.context.observing.close()  # returns although nothing was taken
        assert collected.spans == []
        collected.may_go_on.set()
        await until(lambda: bool(collected.spans))


async def test_more_spans_than_fit_are_dropped(engine, monkeypatch):
    monkeypatch.setattr(otlp, "QUEUE_SPANS", 1024)
    monkeypatch.setattr(otlp, "CLOSE_S", 0.1)
    with collector() as collected:
        collected.hangs.set()
        client = Client(
            engine, observe=ObserveConfig(trace=True, trace_endpoint=collected.grpc_url)
        )
        await asyncio.gather(*(client.post("/generate", BODY) for _ in range(400)))
        await client.context.observing.close()
        collected.may_go_on.set()
