"""Requests that are too long are refused with the code and the words that clients look for.

Their patterns: `ExceptionCheckers.is_error_str_context_window_exceeded` of litellm,
`LLMContextLengthExceededException` of crewAI, `OpenAIContextOverflowError` of langchain-openai (the
code), Claude Code (the words of Anthropic's API).
"""

from __future__ import annotations

import pytest

LONG = "x" * 2100  # every byte is a token, and the context has 2048
WORDS = ("this model's maximum context length is", "is longer than the model's context length")
MESSAGES = [{"role": "user", "content": LONG}]
SHORT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": [65] * 2100}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
    ],
)
async def test_long_prompts_are_refused_in_known_words(client, path, body, param, stream):
    response = await client.post(path, {**body, "stream": stream})

    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert all(words in error["message"].lower() for words in WORDS)
    assert f"{param} has" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": SHORT, "max_tokens": 5000}, "max_tokens"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 5000}, "max_tokens"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 5000}, "max_output_tokens"),
    ],
)
async def test_long_outputs_are_refused_in_known_words(client, path, body, param):
    error = (await client.post(path, body)).json()["error"]

    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert WORDS[0] in error["message"]
    assert error["message"].startswith(f"{param}: ")


async def test_text_that_cannot_fit_is_refused_in_known_words(client):
    error = (await client.post("/v1/completions", {"prompt": "x" * 10**6})).json()["error"]

    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert WORDS[0] in error["message"].lower()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": MESSAGES}, "prompt is too long: {prompt} tokens > 2048 maximum"),
        (
            {"messages": SHORT, "max_tokens": 5000},
            "input length and `max_tokens` exceed context limit: {prompt} + 5000 > 2048, decrease "
            "input length or `max_tokens` and try again",
        ),
    ],
)
async def test_anthropic_clients_read_their_own_words(client, fields, words):
    counted = await client.post(
        "/v1/messages/count_tokens", {"model": "m", "messages": fields["messages"]}
    )
    response = await client.post("/v1/messages", {"model": "m", "max_tokens": 10, **fields})

    assert response.status_code == 400
    prompt = counted.json()["input_tokens"]
    assert response.json()["error"]["message"] == words.format(prompt=prompt)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": LONG}, "text"),
        ("/generate", {"input_ids": [65] * 2100}, "input_ids"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "max_new_tokens"),
    ],
)
async def test_native_route_uses_the_same_words(client, path, body, param):
    error = (await client.post(path, body)).json()["error"]

    assert error["param"] == param
    assert WORDS[0] in error["message"].lower()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/api/chat", {"model": "m", "messages": MESSAGES}, "messages"),
        ("/api/generate", {"model": "m", "prompt": LONG}, "prompt"),
    ],
)
async def test_ollama_routes_use_the_same_words(client, path, body, param):
    message = (await client.post(path, {**body, "stream": False})).json()["error"]

    assert f"{param} has" in message
    assert WORDS[0] in message.lower()
