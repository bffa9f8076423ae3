"""Budgets of thinking: from bodies to the scheduler."""

from __future__ import annotations

import pytest

from tests.support.http import Client

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ON = {"enable_thinking": True}
BUDGETS = [
    ("/v1/chat/completions", {**CHAT, "thinking_budget": 7}, 7),
    ("/v1/chat/completions", {**CHAT, "thinking_budget": 7, "max_thinking_tokens": 5}, 5),
    ("/v1/chat/completions", {**CHAT, "thinking": {"type": "enabled", "budget_tokens": 0}}, 0),
    ("/v1/responses", {"input": "x", "reasoning": {"budget_tokens": 9}}, 9),
    (
        "/v1/messages",
        {
            **CHAT,
            "model": "m",
            "max_tokens": 5,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        1024,
    ),
    ("/generate", {"text": "x<think>", "max_thinking_tokens": 3}, 3),
]


@pytest.mark.parametrize(("path", "body", "budget"), BUDGETS)
async def test_budget_reaches_the_scheduler(client, path, body, budget):
    assert (await client.post(path, body)).status_code == 200

    tokenizer = client.engine.manager.tokenizer
    thinking = client.engine.control.requests[-1].thinking
    assert thinking.budget == budget
    assert thinking.ends == (tuple(tokenizer.encode("</think>", add_special_tokens=False)),)


@pytest.mark.parametrize(
    ("path", "body", "inside"),
    [
        ("/v1/chat/completions", {**CHAT, "thinking_budget": 1}, False),
        ("/v1/chat/completions", {**CHAT, "thinking_budget": 1, **ON}, True),
        ("/generate", {"text": "x", "max_thinking_tokens": 1}, False),
        ("/generate", {"text": "x<think>\n", "max_thinking_tokens": 1}, True),
        ("/generate", {"text": "x", "require_reasoning": True}, True),
    ],
)
async def test_budget_counts_from_where_thinking_begins(client, path, body, inside):
    assert (await client.post(path, body)).status_code == 200
    assert client.engine.control.requests[-1].thinking.inside is inside


@pytest.mark.parametrize("value", [-1, 1.5, "3", 2**31])
async def test_budget_out_of_bounds_is_refused(client, value):
    response = await client.post("/v1/chat/completions", {**CHAT, "thinking_budget": value})

    assert response.status_code == 400
    assert "thinking_budget" in response.text


async def test_model_that_does_not_think_keeps_to_every_budget(engine):
    client = Client(engine, reasoning_parser=None)
    response = await client.post("/v1/chat/completions", {**CHAT, "thinking_budget": 1})

    assert response.status_code == 200
    assert engine.control.requests[-1].thinking is None
    await client.http.aclose()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("<think>ab</think>c", 4),
        ("<think>abc", 4),
        ("<think> a </think>", 5),
        ("abc", 0),
    ],
)
async def test_reasoning_tokens_are_counted_with_their_markers(client, text, tokens):
    client.engine.control.script = lambda request, prompt: text
    body = {**CHAT, "stop_token_ids": []}
    reply = (await client.post("/v1/chat/completions", body)).json()
    finished = reply["choices"][0]["finish_reason"] == "stop" and "</think>" not in text

    # an output that never leaves thinking is thinking to its last token, which ends it
    assert reply["usage"]["reasoning_tokens"] == tokens + (finished and bool(tokens))
