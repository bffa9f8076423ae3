"""Errors name the field that the client wrote, as the client wrote it."""

from __future__ import annotations

import pytest

from tests.support.http import Client, checkpoint, client, engine

__all__ = ["checkpoint", "client", "engine"]

CHAT = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": []}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 5}}]}
OLLAMA = {"model": "m", "messages": CHAT, "stream": False}
LABELS = {"label_token_ids": [1]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "input_ids": 0.5}, "input_ids"),
        ("/v1/chat/completions", {"messages": CHAT, "input_ids": [10**9]}, "input_ids"),
        ("/v1/chat/completions", {"messages": 5}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 10**9}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 10**9},
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": CHAT, "model": "http://x"}, "model"),
        ("/v1/chat/completions", {"messages": CHAT, "lora_path": "x"}, "lora_path"),
        ("/v1/completions", {"prompt": "x", "model": "a:b"}, "model"),
        (
            "/v1/completions",
            {"prompt": "x", "json_schema": "{}", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ("/v1/completions", {"prompt": "x", "best_of": 10**9}, "best_of"),
        ("/v1/completions", {"prompt": "x", "n": 10**9}, "n"),
        ("/v1/responses", {"input": "x", "text": [1]}, "text"),
        ("/v1/score", {"query": "q" * 9000, "items": ["a"], **LABELS}, "query"),
        ("/v1/score", {"query": "q", "items": ["a" * 9000], **LABELS}, "items"),
        ("/api/chat", {**OLLAMA, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ("/api/chat", {**OLLAMA, "options": {"num_predict": 10**9}}, "options.num_predict"),
        ("/api/chat", {**OLLAMA, "options": {"num_ctx": "x"}}, "options.num_ctx"),
        ("/api/chat", {**OLLAMA, "options": {"mirostat": {}}}, "options.mirostat"),
        ("/api/chat", {**OLLAMA, "messages": [CALL]}, "messages[0].tool_calls[0].function.name"),
        ("/api/chat", {**OLLAMA, "tools": [TOOL]}, "tools[0].function.name"),
        ("/tokenize", {"messages": CHAT, "tools": [TOOL]}, "tools[0].function.name"),
        ("/tokenize", {"messages": CHAT, "tools": [{"name": "x"}]}, "tools[0].function"),
        (
            "/vertex_generate",
            {"instances": [{"text": "x"}], "parameters": {"stream": 5}},
            "parameters.stream",
        ),
        (
            "/vertex_generate",
            {"instances": [{"text": "x"}], "parameters": {"text": 5}},
            "parameters.text",
        ),
    ],
)
async def test_the_field_is_named_as_it_was_written(client: Client, path, body, field):
    response = await client.post(path, body)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if isinstance(error, str):  # Ollama has no place for the field but the message
        assert error.startswith(f"{field}:")
    else:
        assert error["param"] == field


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"content-type": "application/json; charset=utf-16"}, 415, "charset utf-8"),
        ({"content-type": 'application/json; charset="UTF-8"'}, 200, ""),
        ({"expect": "200-evil"}, 417, "100-continue"),
        ({"expect": "100-Continue"}, 200, ""),
        ({"content-encoding": "br"}, 415, "gzip or deflate"),
    ],
)
async def test_headers_that_cannot_be_met_are_refused(client: Client, headers, status, words):
    headers = {"content-type": "application/json", **headers}
    response = await client.http.post("/generate", content=b'{"text": "x"}', headers=headers)

    assert response.status_code == status
    assert words in response.text
