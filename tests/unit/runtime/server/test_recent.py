"""`/requests`: the newest requests, and where their time went."""

from __future__ import annotations

import pytest

from sylvan.runtime.server.recent import KEPT
from tests.support.http import two_tenants

CHAT = {"messages": [{"role": "user", "content": "x"}]}


async def requests(client, key=None, **query):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await client.get("/requests", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["requests"]


async def test_a_request_that_is_over_is_reported(client):
    await client.post("/generate", {"text": "abc", "rid": "mine", "sampling_params": {"n": 2}})
    [found] = await requests(client)

    assert (found["rid"], found["kind"], found["samples"]) == ("mine", "generate", 2)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (3, 8)
    assert found["finish"] == "stop"
    assert set(found["cached_tokens"]) == {"device", "host", "storage"}
    assert not {"text", "input_ids", "messages"} & found.keys()


async def test_the_newest_come_first_and_no_more_than_asked_for(client):
    for name in ("a", "b", "c"):
        await client.post("/generate", {"text": "x", "rid": name})

    assert [past["rid"] for past in await requests(client, limit=2)] == ["c", "b"]
    for limit in (0, KEPT + 1):
        assert (await client.get("/requests", params={"limit": limit})).status_code == 400


async def test_old_requests_are_forgotten(client):
    for number in range(KEPT + 3):
        await client.post("/generate", {"text": "x", "rid": str(number)})
    found = await requests(client, limit=KEPT)

    assert len(found) == KEPT
    assert (found[0]["rid"], found[-1]["rid"]) == (str(KEPT + 2), "3")


async def test_probes_of_health_are_not_listed(client):
    await client.get("/health_generate")

    assert await requests(client) == []


async def test_a_tenant_sees_its_own_requests_only(engine, tmp_path):
    client = two_tenants(engine, tmp_path)
    for name in ("red", "blue"):
        headers = {"authorization": f"Bearer {name}"}
        await client.post("/generate", {"text": "x", "rid": f"{name}-1"}, headers=headers)

    assert [past["rid"] for past in await requests(client, "red")] == ["red-1"]
    assert [past["tenant"] for past in await requests(client, "blue")] == ["blue"]
    assert (await client.get("/requests")).status_code == 401


async def test_its_stages_are_those_of_its_trace(client):
    await client.post("/generate", {"text": "abc", "rid": "mine"})
    [found] = await requests(client)
    trace = (await client.get("/trace/mine")).json()

    whole, *stages = trace["spans"]
    assert {span["name"]: span["duration_ms"] for span in stages} == pytest.approx(
        {name: 1e3 * seconds for name, seconds in found["stages"].items()}, abs=1e-3
    )
    assert sum(found["stages"].values()) * 1e3 == pytest.approx(whole["duration_ms"], abs=1e-2)


async def test_a_stream_ends_with_its_meta_info_if_that_is_asked_for(client):
    plain = await client.events("/v1/chat/completions", {**CHAT, "stream": True})
    body = {**CHAT, "stream": True, "return_meta_info": True, "logprobs": True}
    asked = await client.events("/v1/chat/completions", body)
    whole = (await client.post("/v1/chat/completions", {**body, "stream": False})).json()

    assert not any("meta_info" in str(event) for event in plain)
    [end] = [e["choices"][0] for e in asked[:-1] if e["choices"][0]["finish_reason"]]
    info, expected = end["meta_info"], whole["choices"][0]["meta_info"]
    missing = expected.keys() - info.keys()
    assert all("token_logprobs" in name for name in missing)  # they were streamed
    for name in ("prompt_tokens", "completion_tokens", "finish_reason", "queue_time"):
        assert info[name] == expected[name]
