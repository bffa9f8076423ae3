"""Shared by all routes: strict bodies, limits, credentials, pages, the OpenAPI document."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from sylvan.config.values import Secret
from sylvan.protocol.messages import Finish
from sylvan.runtime.server.routes import ENDPOINTS
from sylvan.runtime.server.security import Level
from tests.support.http import Client

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


async def send(client, path, content, headers=JSON):
    return await client.http.post(path, content=content, headers=headers)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"text": NaN}', "NaN is not a JSON number"),
        (b'{"text": -Infinity}', "-Infinity"),
        (b'{"text": 1e999}', "too large"),
        (b'{"text": 123456789012345678901234567890}', "beyond 64 bits"),
        (b'{"text": "a", "text": "b"}', "occurs twice"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "deeper than"),
        (b'{"text":' + b'{"a":' * 200 + b"1" + b"}" * 201, "deeper than"),
    ],
)
async def test_body_that_is_no_strict_json_is_refused(client, path, content, words):
    response = await send(client, path, content)

    assert response.status_code == 400
    error = response.json()
    assert words in error["error"]["message"]
    if path != "/generate":
        assert error["type"] == "Bad Request"


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
async def test_v1_routes_want_a_json_content_type(client, headers):
    body = json.dumps(CHAT).encode()
    response = await send(client, "/v1/chat/completions", body, headers)

    assert response.status_code == 400
    assert "Content-Type must be application/json" in response.json()["message"]


async def test_native_routes_take_any_content_type(client):
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert (await send(client, "/generate", b'{"text": "a"}', headers)).status_code == 200


async def test_large_body_is_refused_by_its_announced_length(engine):
    client = Client(engine, max_body_bytes=1024)
    response = await send(client, "/generate", b'{"text": "' + b"a" * 2000 + b'"}')

    assert response.status_code == 413
    assert "1024 bytes" in response.json()["error"]["message"]


async def test_large_body_is_refused_while_it_streams_in(engine):
    client = Client(engine, max_body_bytes=1024)
    sent = 0

    async def chunks():
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b"a" * 100

    response = await client.http.post("/v1/completions", content=chunks(), headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_path_and_method_have_the_shape_of_their_family(client):
    flat = await client.get("/v1/nothing")
    assert (flat.status_code, flat.json()["type"]) == (404, "404")
    assert flat.json()["error"]["message"]
    native = await client.get("/generate")
    assert native.status_code == 405
    assert native.json()["error"]["code"] == 405


async def test_full_engine_answers_503_with_retry_after(client):
    client.engine.control.fail = Finish(type="abort", message="queue is full", status=503)
    response = await client.post("/v1/chat/completions", CHAT)

    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["message"] == "queue is full"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_stream_that_fails_at_once_keeps_its_status(client, path):
    client.engine.control.fail = Finish(type="abort", message="queue is full", status=503)
    body = {**CHAT, "prompt": "abc", "text": "abc", "stream": True}
    response = await client.post(path, body)

    assert response.status_code == 503


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_stream_that_fails_later_ends_with_an_error(client, path):
    client.engine.control.fail = Finish(type="abort", message="lost", status=500)
    client.engine.control.fail_after = 2
    body = {**CHAT, "prompt": "abcdef", "stream": True}
    events = await client.events(path, body)

    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["message"] == "lost"
    assert client.engine.manager.num_live == 0


async def test_native_stream_that_fails_later_delivers_the_abort(client):
    client.engine.control.fail = Finish(type="abort", message="lost", status=503)
    client.engine.control.fail_after = 2
    events = await client.events("/generate", {"text": "abcdef", "stream": True})

    reason = events[-2]["meta_info"]["finish_reason"]
    assert reason == {
        "type": "abort",
        "message": "lost",
        "status_code": 503,
        "err_type": "ServiceUnavailable",
    }


# Credentials ------------------------------------------------------------------------------------

OPEN = [e for e in ENDPOINTS if e.level is Level.OPEN]
CLOSED = [e for e in ENDPOINTS if e.level is not Level.OPEN]


def path_of(endpoint):
    name = "app.js" if endpoint.path.startswith("/ui/") else "x"
    return re.sub(r"\{[^}]*\}", name, endpoint.path)


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", CLOSED, ids=lambda e: e.path)
@pytest.mark.parametrize("key", [None, "wrong", "key\u00e9"])
async def test_every_closed_route_wants_the_key(engine, endpoint, key):
    client = Client(engine, api_key=Secret("secret"))
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    response = await client.http.request(endpoint.methods[0], path_of(endpoint), headers=headers)

    if endpoint.level is Level.ADMIN_FORCE:  # there is no admin key, which alone would open it
        assert response.status_code == 403
        return
    assert response.status_code == 401
    body = response.json()
    assert body["error"] == "Unauthorized" or body["type"] == "error"


@pytest.mark.parametrize("endpoint", OPEN, ids=lambda e: e.path)
async def test_open_routes_never_want_a_key(engine, endpoint):
    client = Client(engine, api_key=Secret("secret"))
    assert (await client.get(path_of(endpoint))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret"},
        {"authorization": "bearer secret"},
        {"x-api-key": "secret"},
    ],
)
async def test_the_key_opens(engine, headers):
    client = Client(engine, api_key=Secret("secret"))
    assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_admin_key_closes_admin_routes_to_clients(engine):
    client = Client(engine, api_key=Secret("k"), admin_api_key=Secret("a"))

    def status(key):
        return client.get("/server_info", headers={"authorization": f"Bearer {key}"})

    assert (await status("k")).status_code == 403
    assert (await status("a")).status_code == 200
    assert (await client.get("/server_info")).status_code == 401


async def test_admin_routes_without_keys_are_open_on_loopback_only(engine):
    assert (await Client(engine).get("/server_info")).status_code == 200
    assert (await Client(engine, host="0.0.0.0").get("/server_info")).status_code == 403


async def test_abort_all_is_for_the_operator(engine):
    client = Client(engine, host="0.0.0.0")
    assert (await client.post("/abort_request", {"rid": "x"})).status_code == 200
    assert (await client.post("/abort_request", {"abort_all": True})).status_code == 403


async def test_secrets_are_never_shown(engine):
    shown = {"server": {"api_key": Secret("hidden-1"), "port": 1}, "list": [Secret("hidden-2")]}
    client = Client(engine, api_key=Secret("hidden-3"), shown=shown)
    response = await client.get("/server_info", headers={"authorization": "Bearer hidden-3"})

    assert response.status_code == 200
    assert "hidden" not in response.text
    assert response.json()["server"]["port"] == 1


async def test_key_file_names_tenants_and_budgets(engine, tmp_path):
    entry = {
        "sha256": hashlib.sha256(b"key").hexdigest(),
        "tenant": "acme",
        "requests_per_minute": 2,
    }
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    client = Client(engine, api_key_file=str(tmp_path / "keys.json"))
    headers = {"authorization": "Bearer key"}
    statuses = [
        (await client.post("/generate", {"text": "a"}, headers=headers)).status_code
        for _ in range(3)
    ]

    assert statuses == [200, 200, 429]
    assert engine.control.requests[0].tenant == "acme"


@pytest.fixture
def tenants(engine, tmp_path) -> Client:
    """Keys `acme-key` and `other-key` of two tenants."""
    entries = [
        {"sha256": hashlib.sha256(f"{name}-key".encode()).hexdigest(), "tenant": name}
        for name in ("acme", "other")
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    return Client(engine, api_key_file=str(tmp_path / "keys.json"))


async def test_a_live_rid_of_one_tenant_is_free_for_others(tenants, engine):
    engine.control.hold = True
    acme, other = ({"authorization": f"Bearer {name}-key"} for name in ("acme", "other"))
    body = {"text": "a", "rid": "job-1"}
    first = asyncio.create_task(tenants.post("/generate", body, headers=acme))
    while not engine.control.requests:
        await asyncio.sleep(0)

    again = await tenants.post("/generate", body, headers=acme)
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "rid"
    second = asyncio.create_task(tenants.post("/generate", body, headers=other))
    while len(engine.control.requests) < 2:
        await asyncio.sleep(0)
    assert not second.done()

    await tenants.post("/abort_request", {"rid": "job-1"}, headers=other)
    await second
    assert engine.control.aborted == [engine.control.requests[1].rid]
    assert not first.done()
    engine.manager.abort_all()
    await first


async def test_closing_a_session_aborts_turns_of_its_tenant_only(tenants, engine):
    engine.control.hold = True
    tasks = []
    for name in ("acme", "other"):
        headers = {"authorization": f"Bearer {name}-key"}
        session = {"capacity_of_str_len": 9, "session_id": "s"}
        assert (await tenants.post("/open_session", session, headers=headers)).status_code == 200
        body = {"text": "a", "rid": "turn", "session_params": {"id": "s"}}
        tasks.append(asyncio.create_task(tenants.post("/generate", body, headers=headers)))
    while len(engine.control.requests) < 2:
        await asyncio.sleep(0)

    headers = {"authorization": "Bearer other-key"}
    await tenants.post("/close_session", {"session_id": "s"}, headers=headers)
    await tasks[1]

    assert engine.control.aborted == [engine.control.requests[1].rid]
    assert not tasks[0].done()
    engine.manager.abort_all()
    await tasks[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_only_the_replica_that_there_is_can_be_named(client, path, body):
    header = "x-data-parallel-rank"

    async def status(fields=(), headers=None):
        response = await client.post(path, body | dict(fields), headers=headers or {})
        assert "x-sylvan-ignored-fields" not in response.headers
        return response.status_code

    for name in ("routed_dp_rank", "data_parallel_rank"):
        assert [await status({name: rank}) for rank in (None, 0)] == [200, 200]
        assert {await status({name: rank}) for rank in (7, -1, "0", 0.0, True, [7])} == {400}
    assert await status(headers={header: "0"}) == 200
    assert {await status(headers={header: rank}) for rank in ("7", "-1", "x", "")} == {400}


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_bodies_are_read_within_the_limit(engine, coding, pack):
    client = Client(engine, max_body_bytes=1000)
    headers = JSON | {"content-encoding": coding}
    data = json.dumps({"text": "abc"}).encode()

    async def status(content, **changes):
        response = await send(client, "/generate", content, headers | changes)
        return response.status_code

    assert await status(pack(data)) == 200
    assert await status(pack(json.dumps({"text": "a" * 5000}).encode())) == 413
    assert await status(pack(b"0" * 10**7)[:900]) == 413
    assert await status(pack(data)[:-6]) == 400
    assert await status(data) == 400
    assert await status(data, **{"content-encoding": "br"}) == 415


async def test_every_answer_names_its_call(client):
    ids = set()
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {}), ("/generate", {})):
        ids.add((await client.post(path, body)).headers["x-request-id"])
    assert len(ids) == 3
    streamed = {"text": "a", "stream": True}
    for name, kept in (("abc-1.2:3", True), ("x" * 200, False), ("a b", False)):
        answer = await client.post("/generate", streamed, headers={"x-request-id": name})
        assert (answer.headers["x-request-id"] == name) is kept


# Health -----------------------------------------------------------------------------------------


async def test_health_follows_the_heartbeat(client):
    paths = ["/live", "/ready", "/health", "/health_generate"]
    assert [(await client.get(p)).status_code for p in paths] == [200] * 4

    client.engine.scheduler.client.heartbeat_s -= 3.0
    assert [(await client.get(p)).status_code for p in paths] == [200, 503, 503, 503]

    client.engine.scheduler.beat()
    client.engine.scheduler.client.give_up()
    assert [(await client.get(p)).status_code for p in paths] == [503] * 4


async def test_health_generate_makes_one_token(client):
    assert (await client.get("/health_generate")).status_code == 200
    [request] = client.engine.control.requests
    assert request.sampling.max_new_tokens == 1


async def test_health_itself_generates_nothing(client):
    await client.get("/health")
    assert client.engine.control.requests == []


# Info and control -------------------------------------------------------------------------------


async def test_model_info_names_the_model(client):
    info = (await client.get("/get_model_info")).json()
    assert info == (await client.get("/model_info")).json()
    assert info["served_model_name"] == "scripted"
    assert info["tool_call_parser"] == "qwen"
    assert info["reasoning_parser"] == "qwen3"


async def test_loads_has_one_row_per_replica(client):
    reply = (await client.get("/v1/loads?include=core,queues")).json()
    assert reply["loads"][0]["max_total_num_tokens"] == 2048 * 2 or reply["loads"]
    text = (await client.get("/v1/loads?format=prometheus")).text
    assert 'sylvan_load_num_running_reqs{dp_rank="0"} 0.0' in text
    assert (await client.get("/v1/loads?dp_rank=1")).json()["loads"] == []


@pytest.mark.parametrize("query", ["format=xml", "dp_rank=-1", "dp_rank=many"])
async def test_bad_query_is_refused(client, query):
    assert (await client.get(f"/v1/loads?{query}")).status_code == 400


async def test_flush_is_refused_while_busy(client):
    assert (await client.http.post("/flush_cache")).status_code == 200
    client.engine.control.busy = True
    response = await client.http.post("/flush_cache?timeout=0.1")
    assert response.status_code == 400
    assert "not flushed" in response.text


async def test_pause_and_continue_reach_the_scheduler(client):
    assert (await client.http.post("/pause_generation")).json()["status"] == "ok"
    assert (await client.post("/pause_generation", {"mode": "retract"})).status_code == 200
    assert (await client.post("/pause_generation", {"mode": "stop"})).status_code == 400
    assert (await client.post("/continue_generation", {})).json()["status"] == "ok"
    names = [type(c).__name__ for c in client.engine.control.commands]
    assert names == ["Pause", "Pause", "Resume"]


async def test_tokenize_and_detokenize_are_inverse(client):
    text = "h\u00e9llo"
    reply = (await client.post("/tokenize", {"prompt": text})).json()
    assert reply["count"] == len(reply["tokens"]) == 6
    assert reply["max_model_len"] == 2048
    back = await client.post("/v1/detokenize", {"tokens": reply["tokens"]})
    assert back.json() == {"text": text}
    many = (await client.post("/v1/tokenize", {"prompt": ["a", "bc"]})).json()
    assert many["count"] == [1, 2]
    texts = (await client.post("/detokenize", {"tokens": many["tokens"]})).json()
    assert texts == {"text": ["a", "bc"]}


async def test_tokenize_renders_conversations(client):
    reply = (await client.post("/tokenize", CHAT)).json()
    rendered = (await client.post("/v1/chat/render", CHAT)).json()
    assert reply["tokens"] == rendered["input_ids"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": CHAT["messages"]}])
async def test_tokenize_wants_one_of_prompt_and_messages(client, body):
    assert (await client.post("/tokenize", body)).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [10**6], ["a"], None, [[1], [10**6]]])
async def test_detokenize_refuses_ids_outside_the_vocabulary(client, tokens):
    assert (await client.post("/detokenize", {"tokens": tokens})).status_code == 400


# Pages ------------------------------------------------------------------------------------------


async def test_home_is_text_for_programs_and_a_page_for_browsers(client):
    text = await client.get("/")
    assert text.headers["content-type"].startswith("text/plain")
    assert "/docs" in text.text
    page = await client.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert (await client.http.head("/")).status_code == 200


async def test_docs_need_nothing_from_the_network(client):
    for path in ("/docs", "/docs/docs.js", "/docs/style.css"):
        response = await client.get(path)
        assert response.status_code == 200
        assert "http://" not in response.text
        assert "https://" not in response.text


def refs_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from refs_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from refs_in(item)


async def test_openapi_document_is_complete(client):
    document = (await client.get("/openapi.json")).json()
    for endpoint in ENDPOINTS:
        assert endpoint.path.replace(":path}", "}") in document["paths"]
    operations = [op for path in document["paths"].values() for op in path.values()]
    assert all(op["summary"] for op in operations)
    ids = [op["operationId"] for op in operations]
    assert len(ids) == len(set(ids))
    for ref in refs_in(document):
        assert ref.rsplit("/", 1)[1] in document["components"]["schemas"], ref
    for op in operations:
        if "requestBody" in op:
            assert {"400", "413"} <= set(op["responses"])
            if "application/json" in op["requestBody"]["content"]:
                assert {"500", "503"} <= set(op["responses"])


async def test_cors_is_as_configured(engine):
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    closed = await Client(engine).http.options("/generate", headers=headers)
    assert "access-control-allow-origin" not in closed.headers
    client = Client(engine, cors_origins=("*",), api_key=Secret("k"))
    opened = await client.http.options("/generate", headers=headers)
    assert opened.status_code == 200
    assert opened.headers["access-control-allow-origin"] == "*"


async def test_access_log_has_one_line_per_call(engine, caplog):
    client = Client(engine, access_log=True)
    with caplog.at_level("INFO", logger="sylvan.access"):
        await client.events("/generate", {"text": "abc", "stream": True})
        await client.get("/v1/models/evil%0Aname")

    lines = [r.getMessage() for r in caplog.records]
    assert lines[0].startswith("POST /generate 200")
    assert lines[1].startswith("GET /v1/models/evil\\nname 404")


# Clients that leave -----------------------------------------------------------------------------


async def call_and_leave(client, path, body, after_events):
    """Run the application by hand; disconnect once so many pieces have been sent."""
    left = asyncio.Event()
    sent: list[dict[str, Any]] = []
    if not after_events:
        left.set()
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if messages:
            return messages.pop(0)
        await left.wait()
        while not client.engine.control.requests:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send_(message):
        sent.append(message)
        if len(sent) > after_events:
            left.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "root_path": "",
    }
    await asyncio.wait_for(client.app(scope, receive, send_), 20)
    return sent


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_client_that_leaves_ends_its_requests(engine, caplog, path, streamed):
    client = Client(engine, access_log=True)
    engine.control.hold = True
    body = {**CHAT, "prompt": ["a", "b"], "text": ["a", "b"], "stream": streamed, "n": 1}
    with caplog.at_level("INFO", logger="sylvan.access"):
        await call_and_leave(client, path, body, 0)

    assert engine.manager.num_live == 0
    assert len(engine.control.aborted) == len(engine.control.requests)
    assert " 499 " in caplog.records[-1].getMessage()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_client_that_leaves_amid_a_stream_ends_its_request(engine, path):
    client = Client(engine)
    body = {**CHAT, "prompt": "a" * 999, "text": "a" * 999, "max_tokens": 900, "stream": True}
    engine.control.script = lambda request, prompt: "b" * 900
    body["sampling_params"] = {"max_new_tokens": 900}
    sent = await call_and_leave(client, path, body, 5)

    assert engine.manager.num_live == 0
    assert len(engine.control.aborted) == 1
    assert len(sent) < 800


@pytest.mark.parametrize(("streamed", "after"), [(False, 0), (True, 0), (True, 5)])
async def test_background_request_continues_when_its_client_leaves(engine, streamed, after):
    client = Client(engine)
    engine.control.script = lambda request, prompt: "b" * 900
    body = {"text": "a", "sampling_params": {"max_new_tokens": 900}}
    sent = await call_and_leave(
        client, "/generate", {**body, "stream": streamed, "background": True}, after
    )

    while client.context.detached:
        await asyncio.sleep(0)
    assert engine.control.aborted == []
    assert engine.control.given == 900
    assert engine.manager.num_live == 0
    assert len(sent) < 800


@pytest.mark.parametrize("streamed", [False, True])
async def test_background_request_answers_as_others_do(client, streamed):
    body = {"text": "abc", "stream": streamed}
    replies = []
    for fields in ({}, {"background": True}):
        response = await client.post("/generate", {**body, **fields})
        assert "x-sylvan-ignored-fields" not in response.headers
        texts = re.findall(r'"text":"([^"]*)"', response.text)
        replies.append((response.status_code, texts))
    assert replies[0] == replies[1]

    long = {"text": "a" * 9999, "stream": streamed, "background": True}
    assert (await client.post("/generate", long)).status_code == 400
    assert not client.context.detached


async def test_background_stream_that_fails_ends_as_others_do(client, engine):
    engine.control.fail, engine.control.fail_after = Finish(type="abort", status=503), 2
    body = {"text": "abcdef", "stream": True, "background": True}

    events = (await client.events("/generate", body))[:-1]

    assert events[-1]["meta_info"]["finish_reason"]["status_code"] == 503
