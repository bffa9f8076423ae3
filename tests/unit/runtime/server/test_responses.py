"""`/v1/responses` over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from sylvan.api.openai.responses import chat_messages
from sylvan.config.values import Secret
from sylvan.runtime.serving.answers import AnswerRun
from tests.support.http import Client, two_tenants

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OUTPUT = '<think>Hm.</think>Text<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def says(client, text):
    client.engine.control.script = lambda request, prompt: text


async def create(client, **fields):
    response = await client.post("/v1/responses", {"input": "Hello", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(client):
    ids = client.engine.control.requests[-1].input_ids.tolist()
    return client.engine.manager.tokenizer.decode(ids, skip_special_tokens=False)


async def test_text_becomes_a_message_item(client):
    says(client, "Hi")
    reply = await create(client, instructions="Be brief", metadata={"a": "b"})

    assert reply["object"] == "response"
    assert reply["status"] == "completed"
    [item] = reply["output"]
    assert item["content"][0]["text"] == "Hi"
    assert item["role"] == "assistant"
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert "system\nBe brief" in prompt_of(client)


async def test_thinking_text_and_calls_are_items(client):
    says(client, OUTPUT)
    reply = await create(client, tools=[TOOL])

    assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(reply["output"][2]["arguments"]) == {"a": 1}
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_stored_responses_can_be_read_continued_and_deleted(client):
    says(client, "First")
    first = await create(client)
    read = (await client.get(f"/v1/responses/{first['id']}")).json()
    assert read == first

    says(client, "Second")
    second = await create(client, input="And?", previous_response_id=first["id"])
    prompt = prompt_of(client)
    assert prompt.index("Hello") < prompt.index("First") < prompt.index("And?")
    await create(client, input="More", previous_response_id=second["id"])
    assert "Hello" in prompt_of(client)

    assert (await client.http.delete(f"/v1/responses/{first['id']}")).json()["deleted"] is True
    gone = await client.get(f"/v1/responses/{first['id']}")
    assert gone.status_code == 404
    assert "error" in gone.json()


async def test_unstored_responses_are_forgotten(client):
    reply = await create(client, store=False)
    assert (await client.get(f"/v1/responses/{reply['id']}")).status_code == 404


async def test_tenants_cannot_read_each_other(engine, tmp_path):
    import hashlib

    keys = [{"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} for name in "ab"]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    client = Client(engine, api_key_file=str(tmp_path / "keys.json"), api_key=Secret("plain"))

    def key(name):
        return {"authorization": f"Bearer {name}"}

    made = await client.post("/v1/responses", {"input": "x"}, headers=key("a"))
    path = f"/v1/responses/{made.json()['id']}"
    assert (await client.get(path, headers=key("a"))).status_code == 200
    assert (await client.get(path, headers=key("b"))).status_code == 404


async def stream(client, **fields):
    body = {"input": "Hello", "stream": True, **fields}
    response = await client.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append(content)
    return events


async def test_events_add_up_to_the_response(client):
    says(client, OUTPUT)
    events = await stream(client, tools=[TOOL])

    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"] for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1]["response"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == "Text"
    arguments = "".join(
        e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"
    )
    assert json.loads(arguments) == {"a": 1}
    assert (await client.get(f"/v1/responses/{final['id']}")).json() == final


async def test_length_makes_a_response_incomplete(client):
    says(client, "x" * 50)
    reply = await create(client, max_output_tokens=5)
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    events = await stream(client, max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"


async def test_background_responses_are_read_later(client):
    says(client, "Hi")
    reply = await create(client, background=True)
    assert reply["status"] == "queued"
    path = f"/v1/responses/{reply['id']}"
    while (found := (await client.get(path)).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0)
    assert found["status"] == "completed"
    assert found["output"][0]["content"][0]["text"] == "Hi"


async def test_background_responses_tell_of_a_fault_of_our_own(client, monkeypatch):
    async def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(AnswerRun, "whole", broken)
    path = f"/v1/responses/{(await create(client, background=True))['id']}"
    while (found := (await client.get(path)).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0)

    assert found["status"] == "failed"
    assert found["error"]["message"] == "Internal error; see the server's log."


async def test_tenants_do_not_touch_responses_of_others(engine, tmp_path):
    client = two_tenants(engine, tmp_path)
    red, blue = ({"authorization": f"Bearer {key}"} for key in ("red", "blue"))
    body = {"input": "x", "request_id": "resp_1"}
    for headers in (red, blue):
        assert (await client.post("/v1/responses", body, headers=headers)).status_code == 200
    path = "/v1/responses/resp_1"

    assert (await client.http.delete(path, headers=blue)).status_code == 200
    assert (await client.get(path, headers=blue)).status_code == 404
    assert (await client.get(path, headers=red)).status_code == 200
    await client.http.aclose()


async def test_background_responses_can_be_cancelled(client):
    client.engine.control.hold = True
    reply = await create(client, background=True)
    path = f"/v1/responses/{reply['id']}"
    while not client.engine.control.requests:
        await asyncio.sleep(0)
    assert (await client.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert client.engine.manager.num_live == 0


async def test_items_of_earlier_turns_become_messages(client):
    items = [
        {"role": "developer", "content": "Rules"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    await create(client, input=items, tools=[TOOL])
    prompt = prompt_of(client)

    assert prompt.index("system\nRules") < prompt.index("user\nHello") < prompt.index("tool\n42")


async def test_text_format_constrains_the_answer(client):
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    await create(client, text={"format": form})

    assert json.loads(client.engine.control.requests[-1].sampling.json_schema) == schema


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, None),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"previous_response_id": "x"}, 400, "previous_response_id"),
        ({"tools": [{"type": "oracle"}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, 400, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, 400, "tool_choice"),
        ({"include": ["foo"]}, 400, "include[0]"),
        ({"top_logprobs": 10**6}, 400, "top_logprobs"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, 400, "max_output_tokens"),
        ({"background": True, "store": False}, 400, "background"),
        ({"temperature": -1}, 400, "temperature"),
    ],
)
async def test_bad_input_is_refused_in_the_nested_shape(client, fields, status, param):
    response = await client.post("/v1/responses", {"input": "x", **fields})

    assert response.status_code == status
    error = response.json()
    assert list(error) == ["error"]
    assert param is None or error["error"]["param"] == param


FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPACE = {"type": "namespace", "name": "files", "tools": [FIND]}
HOSTED = [{"type": "web_search"}, {"type": "mcp", "server_label": "x", "server_url": "http://x"}]


def call_of(name, **arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


async def events_of(client, **fields):
    body = {"input": "x", "stream": True, **fields}
    response = await client.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line[:6] == "data: "]


async def test_tools_of_all_types_are_taken_and_calls_have_their_shapes(client):
    patch = '*** Begin\n+\u00e4 "q"\n'
    says(client, call_of("apply_patch", input=patch) + call_of("files.find", a=1))
    tools = [PATCH, *HOSTED, SPACE]
    response = await client.post("/v1/responses", {"input": "x", "tools": tools})

    custom, function = response.json()["output"]
    assert (custom["type"], custom["name"], custom["input"]) == (
        "custom_tool_call",
        "apply_patch",
        patch,
    )
    assert (function["type"], function["name"], function["namespace"]) == (
        "function_call",
        "find",
        "files",
    )
    assert json.loads(function["arguments"]) == {"a": 1}
    assert response.headers["x-sylvan-ignored-fields"] == "tools[1], tools[2]"
    assert [tool["type"] for tool in response.json()["tools"]] == [t["type"] for t in tools]
    assert "start: /.+/" in prompt_of(client)

    says(client, "Done.")
    outputs = [
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "ok"},
        {"type": "function_call_output", "call_id": function["call_id"], "output": "ok"},
    ]
    history = [{"role": "user", "content": "x"}, custom, function, *outputs]
    history.insert(1, {"type": "web_search_call", "id": "ws_1", "status": "completed"})
    again = await client.post("/v1/responses", {"input": history, "tools": tools})
    assert again.status_code == 200, again.text
    assert '"name": "files.find"' in prompt_of(client)


async def test_custom_calls_have_events_of_their_own(client):
    says(client, call_of("apply_patch", input="a\nb"))
    events = await events_of(client, tools=[PATCH])

    kinds = [event["type"] for event in events]
    assert "response.function_call_arguments.delta" not in kinds
    [delta] = [e for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    [done] = [e for e in events if e["type"] == "response.output_item.done"]
    assert delta["delta"] == done["item"]["input"] == "a\nb"
    assert delta["item_id"] == done["item"]["id"]
    assert events[-1]["response"]["output"] == [done["item"]]


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ({"type": "function", "name": "find", "namespace": "files"}, None),
        ({"type": "custom", "name": "apply_patch"}, None),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "apply_patch"}],
            },
            ["apply_patch"],
        ),
    ],
)
async def test_tools_are_chosen_by_their_own_names(client, choice, offered):
    says(client, call_of("apply_patch", input="x"))
    body = {"input": "x", "tools": [PATCH, SPACE], "tool_choice": choice}
    assert (await client.post("/v1/responses", body)).status_code == 200

    assert client.engine.control.requests[-1].sampling.structural_tag
    if offered:
        assert "files.find" not in prompt_of(client)
    wrong = {**body, "tool_choice": {"type": "function", "name": "nothing"}}
    assert (await client.post("/v1/responses", wrong)).status_code == 400


@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probabilities_of_the_text_are_included(client, streamed):
    says(client, "<think>no</think>Hey" + call_of("find"))
    fields = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "tools": [FIND],
    }
    if streamed:
        events = await events_of(client, **fields)
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        told = [entry["token"] for delta in deltas for entry in delta["logprobs"]]
        assert "".join(told) == "Hey"
        output = events[-1]["response"]["output"]
    else:
        output = (await create(client, **fields))["output"]

    [message] = [item for item in output if item["type"] == "message"]
    [part] = message["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Hey"
    assert len(part["logprobs"][0]["top_logprobs"]) == 2


async def test_thinking_can_be_kept_by_the_client(client):
    says(client, "<think>Secret plan \u00e4.</think>Hey")
    include = ["reasoning.encrypted_content"]
    thought, message = (await create(client, store=False, include=include))["output"]
    plain, _ = (await create(client, store=False))["output"]
    assert "encrypted_content" not in plain

    kept = {**thought, "content": [], "summary": []}
    history = [{"role": "user", "content": "x"}, kept, message, {"role": "user", "content": "?"}]
    assert chat_messages(history, None)[1]["reasoning_content"] == "Secret plan \u00e4."
    for bad in ("x", "sylvan-reasoning-1.!!", 5, None):
        items = [{"type": "reasoning", "encrypted_content": bad}]
        assert chat_messages(items, None)[0]["reasoning_content"] == ""


async def test_input_of_a_response_is_listed(client):
    first = await create(client, input="One")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Two"}]}]
    second = await create(client, input=items, previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"

    page = (await client.get(path)).json()
    texts = [part["text"] for item in page["data"] for part in item["content"]]
    assert (texts[0], texts[-1], page["has_more"]) == ("Two", "One", False)
    assert page["first_id"] == page["data"][0]["id"]
    one = (await client.get(f"{path}?limit=1&order=asc")).json()
    assert (one["data"], one["has_more"]) == (page["data"][-1:], True)
    rest = (await client.get(f"{path}?order=asc&after={one['last_id']}")).json()
    assert rest["data"] == page["data"][-2::-1]
    assert (await client.get(f"{path}?after=nothing")).status_code == 400
    assert (await client.get("/v1/responses/resp_none/input_items")).status_code == 404


async def test_tokens_of_an_input_are_counted(client):
    body = {"input": "Hello", "instructions": "Be brief.", "tools": [FIND]}
    counted = await client.post("/v1/responses/input_tokens", body)
    made = await create(client, **body)

    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": made["usage"]["input_tokens"],
    }


def _turns(count, size):
    for i in range(count):
        yield {"role": "user", "content": f"question {i} " + "x" * size}
        yield {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}
        yield {"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i}"}
        yield {"role": "assistant", "content": f"answer {i}"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_truncation_leaves_out_the_oldest_turns(client, streamed):
    length = client.engine.manager.facts.context_len
    items = [*_turns(12, length // 8), {"role": "user", "content": "last"}]
    body = {"input": items, "instructions": "Be brief", "max_output_tokens": 16}
    refused = await client.post("/v1/responses", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    if streamed:
        events = await client.post("/v1/responses", {**body, "truncation": "auto", "stream": True})
        assert "response.failed" not in events.text
    else:
        assert (await create(client, **body, truncation="auto"))["truncation"] == "auto"
    prompt = prompt_of(client)
    used = len(client.engine.control.requests[-1].input_ids)

    kept = [i for i in range(12) if f"question {i} " in prompt]
    assert kept == list(range(kept[0], 12))
    assert [int(found) for found in re.findall(r"result (\d+)", prompt)] == kept
    assert "Be brief" in prompt
    assert "last" in prompt
    room = length - 16
    assert used <= room < used + length // 8 + 200  # one turn more does not fit


async def test_truncation_changes_nothing_that_fits(client):
    await create(client, input=list(_turns(2, 3)), truncation="auto")
    short = prompt_of(client)
    await create(client, input=list(_turns(2, 3)))

    assert prompt_of(client) == short


async def test_a_last_turn_that_is_too_long_is_refused_with_truncation_too(client):
    text = "x" * (2 * client.engine.manager.facts.context_len)
    items = [*_turns(1, 5), {"role": "user", "content": text}]
    response = await client.post("/v1/responses", {"input": items, "truncation": "auto"})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
