"""Parsers on their own, scores, cloud platforms, models of another kind."""

from __future__ import annotations

import math

import pytest

TOOLS = [{"type": "function", "function": {"name": n}} for n in ("f", "g")]


async def test_calls_are_found_in_a_text(client):
    text = 'Hi<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>'
    body = {"text": text, "tools": TOOLS}
    for fields in ({}, {"tool_call_parser": "hermes"}):
        reply = (await client.post("/parse_function_call", {**body, **fields})).json()
        assert reply["normal_text"] == "Hi"
        assert reply["calls"] == [{"tool_index": 1, "name": "g", "parameters": '{"a": 1}'}]


async def test_thinking_is_found_in_a_text(client):
    body = {"text": "<think>a</think>b", "reasoning_parser": "qwen3", "return_blocks": True}
    reply = (await client.post("/separate_reasoning", body)).json()

    assert (reply["reasoning_text"], reply["text"]) == ("a", "b")
    assert reply["blocks"] == [{"type": "reasoning", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/parse_function_call", "tool_call_parser"), ("/separate_reasoning", "reasoning_parser")],
)
async def test_unknown_parser_is_refused_with_the_nearest_name(client, path, field):
    response = await client.post(path, {"text": "x", "tools": [], field: "qwenn"})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert "Did you mean" in response.json()["error"]["message"]


async def test_scores_are_probabilities_of_labels(client):
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 7]}
    reply = (await client.post("/v1/score", body)).json()
    assert reply["scores"] == [[pytest.approx(math.exp(-3))] * 2] * 2
    assert reply["object"] == "scoring"

    softmax = (await client.post("/v1/score", {**body, "apply_softmax": True})).json()
    assert softmax["scores"] == [[0.5, 0.5]] * 2
    first = client.engine.control.requests[-2].input_ids.tolist()
    await client.post("/v1/score", {**body, "item_first": True})
    assert client.engine.control.requests[-2].input_ids.tolist() == first[::-1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [[1]]}, "label_token_ids"),
        ({"items": None}, "items"),
        ({"query": [1]}, "items"),
    ],
)
async def test_bad_scores_are_refused(client, fields, param):
    body = {"query": "q", "items": ["a", "b"], "label_token_ids": [5, 7], **fields}
    response = await client.post("/v1/score", body)

    assert (response.status_code, response.json()["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/classify", {"input": ["x"]}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/encode", {"text": "x"}),
        ("/classify", {"text": "x"}),
    ],
)
async def test_vectors_of_a_generating_model_are_refused(client, path, body):
    response = await client.post(path, body)

    assert response.status_code == 400
    assert "generates text" in response.text


async def test_transcription_is_not_implemented(client):
    response = await client.http.post("/v1/audio/transcriptions", files={"file": b"RIFF"})
    assert response.status_code == 501


async def test_cloud_platforms_have_their_routes(client):
    assert (await client.get("/ping")).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert (await client.post("/invocations", chat)).json()["object"] == "chat.completion"
    body = {
        "instances": [{"text": "ab"}, {"text": "cd"}],
        "parameters": {"sampling_params": {"max_new_tokens": 2}},
    }
    reply = (await client.post("/vertex_generate", body)).json()
    assert [p["text"] for p in reply["predictions"]] == ["ab", "cd"]
    bad = await client.post("/vertex_generate", {"instances": [{"text": "a"}, {}]})
    assert bad.status_code == 400
