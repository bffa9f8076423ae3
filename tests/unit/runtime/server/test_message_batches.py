"""Anthropic's message batches, documents and search results; pulling by Ollama's clients."""

from __future__ import annotations

import asyncio
import json

from tests.support.http import Client, checkpoint, client, engine, two_tenants

__all__ = ["checkpoint", "client", "engine"]

ASKED = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
BATCHES = "/v1/messages/batches"


def request(name: str, **params: object) -> dict[str, object]:
    return {"custom_id": name, "params": {**ASKED, **params}}


async def ended(client: Client, name: str, **kwargs: object) -> dict[str, object]:
    while True:
        found = (await client.get(f"{BATCHES}/{name}", **kwargs)).json()
        if found["processing_status"] == "ended":
            return found
        await asyncio.sleep(0.01)


async def test_each_request_has_its_result(client: Client) -> None:
    alone = (await client.post("/v1/messages", ASKED)).json()
    made = await client.post(BATCHES, {"requests": [request("a"), request("b", max_tokens=-1)]})
    assert made.status_code == 200, made.text
    state = made.json()
    assert (state["type"], state["processing_status"]) == ("message_batch", "in_progress")

    state = await ended(client, state["id"])
    assert state["request_counts"] == {
        "processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 0,
    }  # fmt: skip
    lines = (await client.get(state["results_url"])).text.splitlines()
    found = {line["custom_id"]: line["result"] for line in map(json.loads, lines)}
    assert found["a"]["message"]["content"] == alone["content"]
    assert found["b"]["type"] == "errored"
    assert "max_tokens" in found["b"]["error"]["error"]["message"]

    assert [b["id"] for b in (await client.get(BATCHES)).json()["data"]] == [state["id"]]
    assert (await client.get("/v1/batches")).json()["data"] == []
    gone = await client.http.delete(f"{BATCHES}/{state['id']}")
    assert gone.json() == {"id": state["id"], "type": "message_batch_deleted"}
    assert (await client.get(f"{BATCHES}/{state['id']}")).status_code == 404


async def test_what_was_not_answered_is_listed_as_cancelled(client: Client) -> None:
    client.engine.control.hold = True
    state = (await client.post(BATCHES, {"requests": [request("a"), request("b")]})).json()
    await client.post(f"{BATCHES}/{state['id']}/cancel", {})
    state = await ended(client, state["id"])

    assert state["cancel_initiated_at"] is not None
    assert state["request_counts"]["canceled"] == 2
    lines = (await client.get(state["results_url"])).text.splitlines()
    assert {json.loads(line)["result"]["type"] for line in lines} == {"canceled"}


async def test_bad_batches_are_refused(client: Client) -> None:
    for requests, name in (
        ([], "requests"),
        ([request("a"), request("a")], "requests[1].custom_id"),
        ([request("a", stream=True)], "requests[0].params.stream"),
        ([{"custom_id": "a b", "params": {}}], "requests[0].custom_id"),
    ):
        reply = await client.post(BATCHES, {"requests": requests})
        assert reply.status_code == 400
        assert name in reply.json()["error"]["message"]


async def test_tenants_see_their_own(engine, tmp_path) -> None:
    client = two_tenants(engine, tmp_path)
    red, blue = ({"headers": {"x-api-key": name}} for name in ("red", "blue"))
    made = await client.post(BATCHES, {"requests": [request("a")]}, **red)
    name = made.json()["id"]
    assert (await client.get(f"{BATCHES}/{name}", **blue)).status_code == 404
    assert (await client.get(BATCHES, **blue)).json()["data"] == []
    await ended(client, name, **red)


async def test_documents_are_read_as_text(client: Client) -> None:
    async def tokens(*blocks: dict[str, object]) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": list(blocks)}]}
        reply = await client.post("/v1/messages/count_tokens", body)
        assert reply.status_code == 200, reply.text
        return reply.json()["input_tokens"]

    text = {"type": "text", "media_type": "text/plain", "data": "abc"}
    parts = {"type": "content", "content": [{"type": "text", "text": "abc"}]}
    plain = await tokens({"type": "text", "text": "T\nabc"})
    for source in (text, parts):
        assert await tokens({"type": "document", "title": "T", "source": source}) == plain
    found = {"type": "search_result", "title": "T", "source": "S", "content": parts["content"]}
    assert await tokens(found) == await tokens({"type": "text", "text": "T\nS\nabc"})

    block = {"type": "document", "source": {"type": "base64", "data": "x"}}
    body = {**ASKED, "messages": [{"role": "user", "content": [block]}]}
    reply = await client.post("/v1/messages", body)
    assert reply.status_code == 400
    assert "messages[0].content[0].source" in reply.json()["error"]["message"]


async def test_the_served_model_is_pulled_at_once(client: Client) -> None:
    for body in ({"model": "scripted"}, {"name": "scripted:latest", "stream": False}):
        reply = await client.post("/api/pull", body)
        assert reply.status_code == 200
        assert json.loads(reply.text.splitlines()[-1]) == {"status": "success"}
    assert (await client.post("/api/pull", {"model": "other"})).status_code == 404
