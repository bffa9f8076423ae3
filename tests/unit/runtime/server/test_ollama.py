"""Ollama's routes over a scripted engine."""

from __future__ import annotations

import json

import pytest

HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def says(client, text):
    client.engine.control.script = lambda request, prompt: text


async def lines(client, path, body):
    response = await client.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


async def test_chat_streams_lines_and_ends_with_counts(client):
    says(client, "<think>Hm.</think>Hi!")
    found = await lines(client, "/api/chat", {"model": "m", "messages": HELLO})

    assert "".join(f["message"]["content"] for f in found) == "Hi!"
    assert "".join(f["message"].get("thinking", "") for f in found) == "Hm."
    assert [f["done"] for f in found] == [False] * (len(found) - 1) + [True]
    last = found[-1]
    assert last["message"]["content"] == ""
    assert last["done_reason"] == "stop"
    assert last["eval_count"] > 0
    assert last["prompt_eval_count"] > 0


async def test_chat_without_stream_is_one_object(client):
    says(client, "text" + CALL)
    body = {"model": "m", "messages": HELLO, "stream": False, "tools": TOOLS}
    reply = (await client.post("/api/chat", body)).json()

    assert reply["message"]["content"] == "text"
    assert reply["message"]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert reply["done"] is True


async def test_streamed_calls_come_whole(client):
    says(client, CALL + "\n" + CALL)
    found = await lines(client, "/api/chat", {"model": "m", "messages": HELLO, "tools": TOOLS})

    calls = [c for f in found for c in f["message"].get("tool_calls", [])]
    assert calls == [{"function": {"name": "f", "arguments": {"a": 1}}}] * 2


async def test_generate_uses_the_template_unless_raw(client):
    body = {"model": "m", "prompt": "Hello", "stream": False, "system": "Be brief"}
    await client.post("/api/generate", body)
    templated = len(client.engine.control.requests[-1].input_ids)
    reply = (await client.post("/api/generate", {**body, "raw": True})).json()

    assert reply["response"] == "Hello"
    assert templated > len(client.engine.control.requests[-1].input_ids) == 5


async def test_options_become_sampling_parameters(client):
    options = {"temperature": 0.5, "num_predict": 7, "stop": ["x"], "seed": 3, "num_ctx": 4096}
    body = {"model": "m", "messages": HELLO, "options": options, "format": "json"}
    await lines(client, "/api/chat", body)

    sampling = client.engine.control.requests[-1].sampling
    assert (sampling.temperature, sampling.max_new_tokens) == (0.5, 7)
    assert (sampling.stop, sampling.sampling_seed) == (("x",), 3)
    assert json.loads(sampling.json_schema) == {"type": "object"}


async def test_length_is_bounded_by_default(client):
    await lines(client, "/api/chat", {"model": "m", "messages": HELLO})
    request = client.engine.control.requests[-1]

    assert request.sampling.max_new_tokens == 2048 - len(request.input_ids)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_empty_prompt_loads_the_model(client, path):
    reply = (await client.post(path, {"model": "m", "messages": [], "prompt": ""})).json()

    assert reply["done_reason"] == "load"
    assert client.engine.control.requests == []


async def test_models_can_be_listed_and_shown(client):
    [card] = (await client.get("/api/tags")).json()["models"]
    shown = (await client.post("/api/show", {"model": card["name"]})).json()

    assert "tools" in shown["capabilities"]
    assert shown["template"]
    assert (await client.get("/api/version")).json()["version"]
    missing = await client.post("/api/show", {"model": "other"})
    assert (missing.status_code, missing.json()) == (404, {"error": "model 'other' not found"})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}),
        ("/api/chat", {"messages": HELLO, "options": {"temprature": 1}}),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": "many"}}),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": -1}}),
        ("/api/chat", {"messages": HELLO, "format": 5}),
        ("/api/generate", {"prompt": "x", "suffix": "y"}),
        ("/api/generate", {"prompt": "x", "context": [1]}),
    ],
)
async def test_bad_input_is_refused_in_ollamas_shape(client, path, fields):
    response = await client.post(path, {"model": "m", **fields})

    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_logprobs_are_of_the_tokens_of_the_text(client, path):
    says(client, "<think>Hm.</think>Hi, you!")
    asked = {"messages": HELLO} if path == "/api/chat" else {"prompt": "Hello"}
    body = {"model": "m", **asked, "logprobs": True, "top_logprobs": 2}
    whole = (await client.post(path, {**body, "stream": False})).json()["logprobs"]
    found = await lines(client, path, body)

    assert "".join(entry["token"] for entry in whole) == "Hi, you!"
    assert {len(entry["top_logprobs"]) for entry in whole} == {2}
    assert [entry for line in found for entry in line.get("logprobs", ())] == whole


async def test_logprobs_are_absent_unless_requested(client):
    body = {"model": "m", "messages": HELLO}
    assert "logprobs" not in (await client.post("/api/chat", {**body, "stream": False})).json()
    assert not [f for f in await lines(client, "/api/chat", body) if "logprobs" in f]
    refused = await client.post("/api/chat", {**body, "top_logprobs": 2})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("top_logprobs")
