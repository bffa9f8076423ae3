"""`/open_session`, `/close_session`, and `session_params` of `/generate`."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from sylvan.config.values import Secret
from tests.support.http import Client

OPEN = {"capacity_of_str_len": 1000, "session_id": "s"}
END = 258


@pytest.fixture
async def session(client):
    client.engine.control.script = lambda request, prompt: "xy"
    assert (await client.post("/open_session", OPEN)).json() == "s"
    return client


def body(text, name=None, /, **go):
    return {"text": text, "rid": name, "session_params": {"id": "s", **go}}


def last_prompt(client):
    request = client.engine.control.requests[-1]
    ids = request.input_ids.tolist()
    return client.engine.manager.tokenizer.decode(ids, skip_special_tokens=False)


async def test_open_answers_a_bare_id_once(client):
    made = (await client.post("/open_session", {"capacity_of_str_len": 5})).json()
    assert isinstance(made, str)
    again = await client.post("/open_session", {**OPEN, "session_id": made})
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "session_id"


async def test_open_and_close_by_query(engine):
    client = Client(engine, api_key=Secret("k"))  # without a key nothing is changed by GET
    client.http.headers["authorization"] = "Bearer k"
    query = "/open_session?capacity_of_str_len=10&session_id=s&timeout=2.5"
    assert (await client.get(query)).json() == "s"
    assert (await client.get(query)).status_code == 400
    assert (await client.get("/close_session?session_id=s")).status_code == 200
    assert (await client.get(query)).json() == "s"
    assert (await client.post("/close_session", {"session_id": "s"})).status_code == 200
    assert (await client.post("/close_session", {"session_id": "s"})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "capacity_of_str_len"),
        ({"capacity_of_str_len": "5"}, "capacity_of_str_len"),
        ({"capacity_of_str_len": -1}, "capacity_of_str_len"),
        ({**OPEN, "timeout": 0}, "timeout"),
        ({**OPEN, "session_id": ""}, "session_id"),
        ({**OPEN, "streaming": "always"}, "streaming"),
    ],
)
async def test_bad_open_is_refused(client, fields, param):
    response = await client.post("/open_session", fields)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_turns_of_a_streaming_session_follow_each_other(client):
    client.engine.control.script = lambda request, prompt: "xy"
    assert (await client.post("/open_session", {**OPEN, "streaming": True})).json() == "s"
    for name, go in (("one", {}), ("two", {}), ("three", {"rid": "two"})):
        assert (await client.post("/generate", body(name, name, **go))).status_code == 200

    assert last_prompt(client).count("xy") == 2
    [session] = client.context.sessions._sessions("").values()
    assert list(session.turns) == ["three"]
    assert session.num_tokens == session.turns["three"].num_tokens


async def test_refused_turn_of_a_streaming_session_leaves_no_trace(client):
    client.engine.control.script = lambda request, prompt: "xy"
    await client.post("/open_session", {**OPEN, "streaming": True})
    await client.post("/generate", body("one", "one"))
    too_long = {**body("x", "two"), "sampling_params": {"max_new_tokens": 10**6}}
    assert (await client.post("/generate", too_long)).status_code == 400
    assert (await client.post("/generate", body("three", "three"))).status_code == 200

    assert last_prompt(client).count("xy") == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_aborted_turn_of_a_streaming_session_leaves_no_trace(client, streamed, leaves):
    client.engine.control.script = lambda request, prompt: "xy"
    await client.post("/open_session", {**OPEN, "streaming": True})
    await client.post("/generate", body("one", "one"))
    client.engine.control.hold = True
    running = asyncio.create_task(
        client.post("/generate", {**body("lost", "two"), "stream": streamed})
    )
    while len(client.engine.control.requests) < 2:
        await asyncio.sleep(0)
    if leaves:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    else:
        await client.post("/abort_request", {"rid": "two"})
        await running
    client.engine.control.hold = False
    assert (await client.post("/generate", body("three", "two"))).status_code == 200

    assert last_prompt(client) == "onexy<|im_end|>three"
    [session] = client.context.sessions._sessions("").values()
    assert list(session.turns) == ["two"]


@pytest.mark.parametrize(
    ("go", "param"),
    [
        ({"rid": "one"}, "session_params.rid"),
        ({"offset": 2}, "session_params.offset"),
        ({"replace": True}, "session_params.replace"),
        ({"drop_previous_output": True}, "session_params.drop_previous_output"),
    ],
)
async def test_streaming_session_has_no_branches(client, go, param):
    await client.post("/open_session", {**OPEN, "streaming": True})
    for name in ("one", "two"):
        assert (await client.post("/generate", body(name, name))).status_code == 200
    response = await client.post("/generate", body("x", **go))

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_streaming_session_has_one_turn_at_a_time(client):
    await client.post("/open_session", {**OPEN, "streaming": True})
    client.engine.control.hold = True
    running = asyncio.create_task(client.post("/generate", body("a", "one")))
    while not client.engine.control.requests:
        await asyncio.sleep(0)
    response = await client.post("/generate", body("b", "two"))
    assert response.status_code == 400
    assert "not finished" in response.text
    await client.post("/abort_request", {"rid": "one"})
    await running


async def test_close_needs_an_id(client):
    assert (await client.http.post("/close_session")).status_code == 400


@pytest.mark.parametrize("streamed", [False, True])
async def test_turns_build_on_each_other(session, streamed):
    for text, rid, parent in (("one", "a", None), ("two", "b", "a"), ("", "c", "b")):
        sent = {**body(text, rid, rid=parent), "stream": streamed}
        assert (await session.post("/generate", sent)).status_code == 200

    assert last_prompt(session) == "onexy<|im_end|>twoxy<|im_end|>"
    await session.post("/generate", body("three", rid="a"))
    assert last_prompt(session) == "onexy<|im_end|>three"
    await session.post("/generate", body("4", rid="b", offset=3, drop_previous_output=True))
    assert last_prompt(session) == "one4"


async def test_ids_and_prompt_ids(session):
    first = {**body(None, "a"), "text": None, "input_ids": [65, 66]}
    reply = (await session.post("/generate", first)).json()
    assert reply["output_ids"][-1] == END
    sent = {**body(None, rid="a"), "input_ids": [], "return_prompt_token_ids": True}
    again = (await session.post("/generate", sent)).json()

    assert again["prompt_token_ids"] == [65, 66, *reply["output_ids"]]
    assert again["meta_info"]["prompt_tokens"] == 2 + len(reply["output_ids"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_params": {"id": "nobody"}}, "session_params.id"),
        ({"session_params": {"rid": "a"}}, "session_params.id"),
        ({"session_params": {"id": "s", "rid": "nobody"}}, "session_params.rid"),
        ({"session_params": {"id": "s", "foo": 1}}, "session_params.foo"),
        ({"session_params": {"id": "s", "offset": "1"}}, "session_params.offset"),
        ({"session_params": {"id": "s"}, "session_id": "s"}, "session_id"),
        ({"session_params": {"id": "s"}, "text": ""}, "input_ids"),
        ({"session_params": {"id": "s"}, "text": ["x"]}, "session_params"),
        ({"session_params": {"id": "s"}, "sampling_params": {"n": 2}}, "sampling_params.n"),
    ],
)
async def test_bad_turn_is_refused(session, fields, param):
    response = await session.post("/generate", {"text": "x", **fields})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert session.engine.control.requests == []


async def test_session_id_alone_and_empty_params_change_nothing(session):
    for fields in ({"session_id": "anything"}, {"session_params": {}}):
        assert (await session.post("/generate", {"text": "one", **fields})).status_code == 200
        assert last_prompt(session) == "one"


async def test_turn_that_the_engine_refuses_leaves_no_trace(session):
    long = await session.post("/generate", body("x" * 3000, "a"))
    assert long.status_code == 400
    assert (await session.post("/generate", body("one", "a"))).status_code == 200


async def test_unfinished_turn_is_no_parent_but_can_be_replaced(session):
    session.engine.control.hold = True
    call = asyncio.create_task(session.post("/generate", body("one", "a")))
    while not session.engine.control.requests:
        await asyncio.sleep(0)
    refused = await session.post("/generate", body("two", "b", rid="a"))
    assert refused.status_code == 400
    assert "has not finished" in refused.text

    session.engine.control.hold = False
    assert (await session.post("/generate", body("two", "b", rid="a", replace=True))).is_success
    assert last_prompt(session) == "onetwo"
    assert (await call).json()["meta_info"]["finish_reason"]["type"] == "abort"


async def test_turn_can_be_continued_as_soon_as_its_end_is_reported(session):
    replies = []

    content = json.dumps({**body("one", "a"), "stream": True}).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if not messages:
            await asyncio.Event().wait()  # it stays
        return messages.pop()

    async def send(message):
        if b'"finish_reason":{' in message.get("body", b""):
            replies.append(await session.post("/generate", body("two", rid="a")))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "root_path": "",
    }
    await asyncio.wait_for(session.app(scope, receive, send), 20)

    assert [reply.status_code for reply in replies] == [200]
    assert last_prompt(session) == "onexy<|im_end|>two"


async def test_tenants_do_not_share_sessions(engine, tmp_path):
    keys = [
        {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name}
        for name in ("one", "two")
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    client = Client(engine, api_key_file=str(tmp_path / "keys.json"))
    one, two = ({"authorization": f"Bearer {name}"} for name in ("one", "two"))

    assert (await client.post("/open_session", OPEN, headers=one)).json() == "s"
    assert (await client.post("/generate", body("x"), headers=two)).status_code == 400
    assert (await client.post("/close_session", {"session_id": "s"}, headers=two)).is_success
    assert (await client.post("/generate", body("x"), headers=one)).status_code == 200


async def test_other_routes_refuse_session_params(client):
    chat = {"messages": [{"role": "user", "content": "x"}], "session_params": {"id": "s"}}
    assert (await client.post("/v1/chat/completions", chat)).status_code == 400
