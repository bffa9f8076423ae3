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


@pytest.mark.parametrize("size", [1, 2, 7])
async def test_continuous_usage_counts_thinking_as_it_comes(client, size):
    client.engine.control.script = lambda request, prompt: "<think>abcd</think>efg"
    client.engine.control.per_message = size
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CHAT, "stream": True, "stream_options": options}
    events = (await client.events("/v1/chat/completions", body))[:-1]

    counts = [event["usage"]["reasoning_tokens"] for event in events]
    done = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(count in (0, min(tokens, 6)) for count, tokens in zip(counts, done, strict=True))
    assert any(0 < count < 6 for count in counts) == (size == 1 or size == 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "text", "fields", "tokens"),
    [
        ("x", "ab</think>c", {"require_reasoning": True}, 3),
        ("x", "abc", {"require_reasoning": True}, 4),  # with the end token, all is thinking
        ("x<think>\n", "ab</think>c", {}, 3),
        ("x", "<think>ab</think>c", {}, 4),
        ("x", "abc</think>", {}, 0),
    ],
)
async def test_native_route_counts_thinking(client, prompt, text, fields, tokens, stream):
    client.engine.control.script = lambda request, prompt: text
    body = {"text": prompt, "stream": stream, **fields}
    if stream:
        reply = (await client.events("/generate", body))[-2]
    else:
        reply = (await client.post("/generate", body)).json()

    assert reply["meta_info"]["reasoning_tokens"] == tokens


SCHEMA = {"type": "object"}
MARKED = {"regex": "a+", **CHAT}
CONSTRAINED = {
    "chat": ("/v1/chat/completions", MARKED),
    "chat-json": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "responses": (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}},
    ),
    "anthropic": (
        "/v1/messages",
        {
            **CHAT,
            "model": "m",
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    "ollama-chat": ("/api/chat", {**CHAT, "model": "m", "format": SCHEMA}),
    "ollama-generate": ("/api/generate", {"prompt": "x", "model": "m", "format": "json"}),
}
OFF = [
    ("chat", {"enable_thinking": False}),
    ("chat", {"reasoning_effort": "none"}),
    ("chat", {"chat_template_kwargs": {"thinking": False}}),
    ("chat", {"thinking": {"type": "disabled"}}),
    ("chat", {"thinking_budget": 0}),
    ("responses", {"reasoning": {"effort": "none"}}),
    ("anthropic", {"thinking": {"type": "disabled"}}),
    ("ollama-chat", {"think": False}),
    ("ollama-generate", {"think": False}),
]


def _ids(client, *texts):
    tokenizer = client.engine.manager.tokenizer
    return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


@pytest.mark.parametrize("name", CONSTRAINED)
async def test_a_constrained_output_may_open_its_thinking(client, name):
    path, body = CONSTRAINED[name]
    assert (await client.post(path, body)).status_code == 200

    request = client.engine.control.requests[-1]
    assert request.sampling.grammar is not None
    assert request.thinking.inside is False
    assert (request.thinking.starts, request.thinking.ends) == tuple(
        (ids,) for ids in _ids(client, "<think>", "</think>")
    )


@pytest.mark.parametrize(("name", "fields"), OFF)
async def test_the_grammar_begins_with_the_output_where_thinking_is_off(client, name, fields):
    path, body = CONSTRAINED[name]
    assert (await client.post(path, body | fields)).status_code == 200

    assert client.engine.control.requests[-1].thinking is None


async def test_a_message_that_is_gone_on_with_opens_no_thinking(client):
    messages = [*CHAT["messages"], {"role": "assistant", "content": "So"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    body = MARKED | {"messages": messages, **more}
    assert (await client.post("/v1/chat/completions", body)).status_code == 200

    assert client.engine.control.requests[-1].thinking is None


@pytest.mark.parametrize(
    ("content", "reasoning"),
    [
        ("<think>\nI think", "so"),
        ([{"type": "text", "text": "<think>\nI"}], "so"),
        ("<think>done</think>\nHello", None),
        ("Hello", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_open_thinking_is_gone_on_with(client, content, reasoning, stream):
    text = "so</think>answer" if reasoning else "answer"
    client.engine.control.script = lambda request, prompt: text
    messages = [*CHAT["messages"], {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True, "stream": stream}
    if stream:
        events = (await client.events("/v1/chat/completions", body))[:-1]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        found = {
            key: "".join(delta.get(key) or "" for delta in deltas) or None
            for key in ("content", "reasoning_content")
        }
    else:
        found = (await client.post("/v1/chat/completions", body)).json()["choices"][0]["message"]

    assert (found["content"], found["reasoning_content"]) == ("answer", reasoning)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_raw_prompts_are_constrained_from_the_start(client, path):
    grammar = {"prompt": "x", "regex": "a+"}
    if path == "/generate":
        grammar = {"text": "x", "sampling_params": {"regex": "a+"}}
    assert (await client.post(path, grammar)).status_code == 200

    assert client.engine.control.requests[-1].thinking is None


async def test_white_space_may_stand_before_the_marker_of_models_that_write_it(engine):
    client = Client(engine, reasoning_parser="glm45")
    assert (await client.post("/v1/chat/completions", MARKED)).status_code == 200

    thinking = engine.control.requests[-1].thinking
    assert thinking.starts == _ids(client, "<think>", "\n<think>")
    await client.http.aclose()


async def test_headers_may_stand_before_answers_and_calls(engine):
    client = Client(engine, reasoning_parser="gpt-oss", tool_parser="gpt-oss")
    final, later = _ids(
        client, "<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>"
    )
    [start] = _ids(client, "<|start|>assistant")
    function = {"name": "f", "parameters": SCHEMA}
    forced = {
        **CHAT,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    for body, headers in ((MARKED, (final, later)), (forced, (start,))):
        assert (await client.post("/v1/chat/completions", body)).status_code == 200
        assert engine.control.requests[-1].thinking.headers == headers
    await client.http.aclose()


async def test_calls_end_the_thinking_only_where_the_grammar_has_calls(engine):
    client = Client(engine, reasoning_parser="kimi_k2", tool_parser="kimi_k2")
    usual, call = _ids(client, "</think>", "<|tool_calls_section_begin|>")
    engine.control.script = lambda request, prompt: "<think>a<|tool_calls_section_begin|></think>b"
    reply = (await client.post("/v1/chat/completions", MARKED)).json()

    assert engine.control.requests[-1].thinking.ends == (usual,)
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"] == "a<|tool_calls_section_begin|>"
    assert message["content"] == "b"

    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {**CHAT, "tools": tools, "tool_choice": "required"}
    assert (await client.post("/v1/chat/completions", body)).status_code == 200
    assert engine.control.requests[-1].thinking.ends == (usual, call)
    await client.http.aclose()
