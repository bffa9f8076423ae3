"""`/v1/responses` over a scripted engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from sylvan.config.values import Secret
from sylvan.runtime.server.turn import Turn
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
    client = Client(engine, api_key_file=str(tmp_path / "keys.json"), api_keys=(Secret("plain"),))

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

    monkeypatch.setattr(Turn, "whole", broken)
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
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
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
