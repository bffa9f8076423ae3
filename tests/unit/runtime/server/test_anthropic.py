"""`/v1/messages` over a scripted engine."""

from __future__ import annotations

import json

import pytest

HELLO = [{"role": "user", "content": "Hello"}]
BODY = {"model": "claude", "max_tokens": 200, "messages": HELLO}
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {}}}}
OUTPUT = (
    '<think>Hm.</think>Let me see.<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Ulm"}}\n</tool_call><tool_call>\n{"name": "get_weather", "arguments": {}}\n'
    "</tool_call>"
)


def says(client, text):
    client.engine.control.script = lambda request, prompt: text


def prompt_of(client):
    ids = client.engine.control.requests[-1].input_ids.tolist()
    return client.engine.manager.tokenizer.decode(ids, skip_special_tokens=False)


async def stream(client, **fields):
    response = await client.post("/v1/messages", {**BODY, "stream": True, **fields})
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append(content)
    return events


async def test_answer_has_the_shape_of_the_contract(client):
    says(client, "Hi")
    reply = (await client.post("/v1/messages", BODY)).json()

    assert reply["id"].startswith("msg_")
    assert reply["content"] == [{"type": "text", "text": "Hi"}]
    assert reply["stop_reason"] == "end_turn"
    assert reply["model"] == "claude"
    usage = reply["usage"]
    prompt = len(client.engine.control.requests[-1].input_ids)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert usage["output_tokens"] == 3


async def test_blocks_of_an_answer_come_in_order(client):
    says(client, OUTPUT)
    reply = (await client.post("/v1/messages", {**BODY, "tools": [TOOL]})).json()

    kinds = [block["type"] for block in reply["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert reply["content"][2]["input"] == {"city": "Ulm"}
    assert reply["stop_reason"] == "tool_use"


async def test_events_come_in_the_order_clients_expect(client):
    says(client, OUTPUT)
    events = await stream(client, tools=[TOOL])

    kinds = [e["type"] for e in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    opened = None
    blocks = []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert opened is None
            opened = event["index"]
            assert opened == len(blocks)
            blocks.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_stop":
            assert event["index"] == opened
            opened = None
        else:
            assert event["index"] == opened
            delta = event["delta"]
            blocks[-1][1] += (
                delta.get("text") or delta.get("thinking") or delta.get("partial_json", "")
            )
    assert opened is None
    assert blocks[:2] == [["thinking", "Hm."], ["text", "Let me see."]]
    assert [json.loads(text) for kind, text in blocks[2:]] == [{"city": "Ulm"}, {}]
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["usage"]["output_tokens"] > 0


async def test_empty_answer_still_has_a_block(client):
    says(client, "")
    kinds = [e["type"] for e in await stream(client)]
    assert "content_block_start" in kinds
    assert "content_block_stop" in kinds


async def test_stop_sequence_and_limit_are_distinguished(client):
    says(client, "abc;def")
    stopped = (await client.post("/v1/messages", {**BODY, "stop_sequences": [";"]})).json()
    limited = (await client.post("/v1/messages", {**BODY, "max_tokens": 3})).json()

    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", ";")
    assert (limited["stop_reason"], limited["stop_sequence"]) == ("max_tokens", None)


async def test_conversations_with_tools_become_chat_messages(client):
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    body = {
        **BODY,
        "messages": messages,
        "tools": [TOOL],
        "system": [{"type": "text", "text": "Be"}],
    }
    assert (await client.post("/v1/messages", body)).status_code == 200

    prompt = prompt_of(client)
    order = ["system\nBe", "user\nHello", "Let me see.<tool_call>", "tool\nrain", "user\nAnd now?"]
    places = [prompt.index(text) for text in order]
    assert places == sorted(places)


async def test_thinking_is_switched_by_the_request(client):
    says(client, "Hm.</think>Yes.")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    reply = (await client.post("/v1/messages", {**BODY, "thinking": thinking})).json()

    assert reply["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}


async def test_tokens_are_counted_as_they_will_be_used(client):
    body = {"model": "m", "messages": HELLO, "tools": [TOOL]}
    counted = (await client.post("/v1/messages/count_tokens", body)).json()["input_tokens"]
    await client.post("/v1/messages", {**body, "max_tokens": 5})

    assert counted == len(client.engine.control.requests[-1].input_ids)


async def test_any_forces_a_call(client):
    says(client, OUTPUT.partition("Let me see.")[2])
    body = {**BODY, "tools": [TOOL], "tool_choice": {"type": "any"}}
    reply = (await client.post("/v1/messages", body)).json()

    assert reply["content"][0]["input"] == {"city": "Ulm"}
    assert client.engine.control.requests[-1].sampling.structural_tag


async def test_tools_that_anthropic_defines_are_offered_or_named(client):
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {**TOOL, "type": "custom"},
    ]
    says(client, '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    response = await client.post("/v1/messages", {**BODY, "tools": tools})

    [block] = response.json()["content"]
    assert (block["name"], block["input"]) == ("bash", {"command": "ls"})
    assert response.headers["x-sylvan-ignored-fields"] == "tools[1]"
    ids = client.engine.control.requests[-1].input_ids.tolist()
    prompt = client.engine.manager.tokenizer.decode(ids, skip_special_tokens=False)
    shown = [json.loads(line)["function"] for line in prompt.splitlines() if '"function"' in line]
    assert [tool["name"] for tool in shown] == [
        "bash",
        "str_replace_based_edit_tool",
        TOOL["name"],
    ]
    assert shown[1]["parameters"]["required"] == ["command", "path"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "1024"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source.type"),
        ({"tools": [{"type": "oracle_20250305", "name": "w"}]}, "tools[0].type"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "any"},
            },
            "tool_choice needs tools",
        ),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "x"),
        ({"temperature": 10**9}, "temperature"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
    ],
)
async def test_bad_input_is_refused_in_anthropics_shape(client, fields, words):
    response = await client.post("/v1/messages", {**BODY, **fields})

    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]
