"""Timeouts and latency targets: from bodies to the scheduler, and back as status and counts."""

from __future__ import annotations

import re

import pytest

from sylvan.protocol.messages import Finish, SchedulerLoad
from sylvan.runtime.tokenizer import router
from sylvan.runtime.tokenizer.types import EdgeLimits
from tests.support.http import Client

GENERATING = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/generate",
    "/v1/messages",
]
CHAT = [{"role": "user", "content": "x"}]


def body_for(path, **fields):
    names = {"/generate": "text", "/v1/completions": "prompt", "/v1/responses": "input"}
    given = {names[path]: "abc"} if path in names else {"messages": CHAT}
    more = {"model": "m", "max_tokens": 5} if path == "/v1/messages" else {}
    return {**given, **more, **fields}


@pytest.mark.parametrize("path", GENERATING)
async def test_timeout_and_targets_reach_the_scheduler(client, path):
    body = body_for(path, timeout=2.5, ttft_ms=100, tpot_ms=20.5)
    assert (await client.post(path, body)).status_code == 200

    request = client.engine.control.requests[-1]
    assert request.deadline_s is not None
    assert 0 < request.deadline_s <= 2.5
    assert (request.ttft_ms, request.tpot_ms) == (100, 20.5)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout", 0),
        ("timeout", -1.0),
        ("timeout", 86401),
        ("timeout", "1"),
        ("ttft_ms", 0),
        ("tpot_ms", 1e12),
    ],
)
async def test_timeout_out_of_bounds_is_refused(client, path, field, value):
    response = await client.post(path, body_for(path, **{field: value}))

    assert response.status_code == 400
    assert f"{field}: " in response.text
    assert client.engine.control.requests == []


@pytest.mark.parametrize("path", GENERATING[:2] + GENERATING[3:])
@pytest.mark.parametrize("message", ["4096 requests wait already", "not done after 1.0 s"])
async def test_full_queue_and_timeout_say_when_to_come_again(client, path, message):
    client.engine.control.fail = Finish(type="abort", message=message, status=503)
    response = await client.post(path, body_for(path, timeout=1))

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert message in response.text


@pytest.mark.parametrize("path", GENERATING)
async def test_a_timeout_is_kept_when_the_scheduler_says_nothing(client, path, monkeypatch):
    monkeypatch.setattr(router, "DEADLINE_GRACE_S", 0.0)
    client.engine.control.hold = True
    response = await client.post(path, body_for(path, timeout=0.01))

    assert response.status_code == 503
    assert "not done after" in response.text
    assert len(client.engine.control.aborted) == 1
    assert client.engine.manager.num_live == 0


async def test_full_edge_says_when_to_come_again(engine):
    engine.manager.limits = EdgeLimits(max_live_samples=1)
    response = await Client(engine).post("/generate", {"text": "a", "sampling_params": {"n": 2}})

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


async def test_load_tells_goodput_and_repairs(client):
    client.engine.scheduler.load = SchedulerLoad(
        targets_set=5, targets_met=4, repaired_pages=2, repaired_locks=3
    )
    client.engine.scheduler.beat()

    [row] = (await client.get("/v1/loads")).json()["loads"]
    assert (row["targets_set"], row["targets_met"], row["repaired_pages"]) == (5, 4, 2)
    assert (row["repaired_locks"], row["repaired_states"]) == (3, 0)
    text = (await client.get("/metrics")).text
    assert re.search(r"^sglang:targets_met\{[^}]*\} 4\.0$", text, re.MULTILINE)
    text = (await client.get("/v1/loads?format=prometheus")).text
    assert 'sylvan_load_repaired_pages{dp_rank="0"} 2.0' in text
