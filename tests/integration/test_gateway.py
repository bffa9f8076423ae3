"""A gateway in front of workers whose engines follow a script: everything but the failover."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx
import pytest

from sylvan.config.values import Secret
from sylvan.gateway.build import client_keys
from sylvan.gateway.http.routes import PASSED
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.routes import ENDPOINTS
from tests.support.cluster import Elsewhere, events, gateway, raw, scripted, until
from tests.support.scripted import write_checkpoint

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def all_workers(checkpoint):
    elsewhere = Elsewhere()
    yield [elsewhere.enter(scripted(checkpoint)) for _ in range(3)]
    elsewhere.close()


@pytest.fixture
def workers(all_workers):
    for worker in all_workers:
        worker.reset()
    return all_workers


@pytest.fixture
async def front(workers):
    async with gateway(*(w.url for w in workers), routing__policy="round_robin") as made:
        yield made


def served(workers):
    return [len(w.engine.control.requests) for w in workers]


BODIES = {
    "/generate": {"text": "abc"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "abc"},
    "/v1/messages": {"model": "m", "max_tokens": 50, "messages": HELLO},
    "/v1/responses": {"model": "m", "input": "abc"},
    "/api/chat": {"model": "m", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "m", "prompt": "abc", "stream": False},
    "/tokenize": {"prompt": "abc"},
    "/v1/messages/count_tokens": {"model": "m", "messages": HELLO},
}


@pytest.mark.parametrize("path", BODIES)
async def test_routes_of_all_families_are_passed_on(front, workers, path):
    response = await front.post(path, BODIES[path])
    async with httpx.AsyncClient(verify=False) as client:
        direct = await client.post(workers[0].url + path, json=BODIES[path])

    assert response.status_code == 200, response.text
    assert response.json().keys() == direct.json().keys()
    assert response.headers["content-type"] == direct.headers["content-type"]


async def test_packed_bodies_are_passed_on(front, workers):
    packed = gzip.compress(json.dumps(BODIES["/v1/chat/completions"]).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}

    async def ask(content, **more):
        path = "/v1/chat/completions"
        return await front.http.post(path, content=content, headers=headers | more)

    plain = await front.post("/v1/chat/completions", BODIES["/v1/chat/completions"])
    found = await ask(packed)
    assert found.status_code == 200, found.text
    assert found.json()["choices"] == plain.json()["choices"]
    assert (await ask(packed[:-9])).status_code == 400
    assert (await ask(b"no gzip")).status_code == 400
    assert (await ask(packed, **{"content-encoding": "br"})).status_code == 415
    async with gateway(workers[0].url, server__max_body_bytes=2000) as small:
        content = gzip.compress(bytes(20_000))
        large = await small.http.post("/generate", content=content, headers=headers)
        assert large.status_code == 413


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/v1/messages"])
async def test_streams_are_passed_on_as_they_are(front, path):
    body = {**BODIES[path], "stream": True}
    response = await front.post(path, body)

    assert response.headers["content-type"].startswith("text/event-stream")
    assert len(events(response.text)) > 3


async def test_ollama_streams_lines_by_default(front):
    response = await front.post("/api/generate", {"model": "m", "prompt": "abc"})

    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert len(response.text.strip().split("\n")) > 2


async def test_every_generating_route_of_a_worker_is_passed_on():
    passed = {route.path for route in PASSED}
    generating = {
        e.path for e in ENDPOINTS if e.budgeted and (e.body or e.form) and not e.missing_feature
    } - {"/v1/files"}

    assert generating - passed == set()


async def test_conversations_continue_where_they_are(front, workers):
    made = (await front.post("/v1/conversations", {})).json()
    path = f"/v1/conversations/{made['id']}"
    for conversation in (made["id"], {"id": made["id"]}):
        body = {"model": "m", "input": "abc", "conversation": conversation}
        assert (await front.post("/v1/responses", body)).status_code == 200
    item = {"type": "message", "role": "user", "content": "more"}
    added = await front.post(f"{path}/items", {"items": [item]})
    items = await front.get(f"{path}/items")
    assert (added.status_code, items.status_code) == (200, 200)
    assert len(items.json()["data"]) == 5
    assert sorted(served(workers)) == [0, 0, 2]
    assert (await front.http.delete(path)).status_code == 200
    assert (await front.get(path)).status_code == 404


async def test_requests_spread_and_load_is_counted_down(front, workers):
    await asyncio.gather(*(front.post("/generate", {"text": f"{i}"}) for i in range(9)))

    assert served(workers) == [3, 3, 3]
    assert all(w.load == 0 and w.queued_tokens == 0 for w in front.runtime.registry.workers)


async def test_cache_aware_keeps_a_conversation_where_it_is(workers):
    async with gateway(*(w.url for w in workers)) as front:
        turns = [{"role": "user", "content": "x" * 800}]
        for turn in range(4):
            await front.post("/v1/chat/completions", {"messages": turns, "max_tokens": 9})
            turns += [{"role": "assistant", "content": "y"}, {"role": "user", "content": f"{turn}"}]

    assert sorted(served(workers)) == [0, 0, 4]


async def test_clients_errors_are_passed_on_and_count_as_success(front):
    response = await front.post("/generate", {"text": "x", "sampling_params": {"top_p": 7}})

    assert response.status_code == 400
    assert "top_p" in response.text
    assert all(w.breaker.failures == 0 for w in front.runtime.registry.workers)


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"{", "not valid JSON"), (b"[]", "JSON object"), (b'{"model": 3}', "model"), (b"", "JSON")],
)
async def test_bodies_that_cannot_be_placed_are_refused(front, body, message):
    response = await front.http.post("/v1/chat/completions", content=body)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_large_bodies_are_refused(workers):
    async with gateway(workers[0].url, server__max_body_bytes=2000) as front:
        response = await front.post("/generate", {"text": "x" * 3000})

    assert response.status_code == 413
    assert "limit of this gateway" in response.json()["error"]["message"]


async def test_bodies_of_all_requests_are_bounded_together(workers):
    async with gateway(workers[0].url, limits__bodies_bytes=2000) as front:
        for _ in range(3):  # what was refused gives back what it held
            refused = await front.post("/generate", {"text": "x" * 3000})
            served = await front.post("/generate", {"text": "x" * 1000})

    assert refused.status_code == 503
    assert "limits.bodies_bytes" in refused.json()["error"]["message"]
    assert served.status_code == 200, served.text


async def test_unknown_paths_and_methods_are_json_errors(front):
    missing, wrong = await front.get("/nothing"), await front.get("/generate")

    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "Not Found: GET /nothing"
    assert wrong.status_code == 405
    assert "POST" in wrong.json()["error"]["message"]


async def test_without_workers_requests_get_503():
    async with gateway() as front:
        response = await front.post("/v1/chat/completions", {"messages": HELLO})
        ready = await front.get("/readiness")

    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["message"] == "There is no worker."
    assert ready.status_code == 503
    assert ready.json() == {"status": "not ready", "healthy_workers": 0, "total_workers": 0}


async def test_request_ids_are_kept_or_made_and_reach_the_worker(front, workers):
    given = await front.post("/generate", {"text": "x"}, headers={"x-correlation-id": "abc-1"})
    made = await front.post("/v1/chat/completions", {"messages": HELLO})
    odd = await front.post("/generate", {"text": "x"}, headers={"x-request-id": "a" * 300})

    assert given.headers["x-request-id"] == "abc-1"
    assert made.headers["x-request-id"].startswith("chatcmpl-")
    assert len(made.headers["x-request-id"]) == len("chatcmpl-") + 24
    assert odd.headers["x-request-id"].startswith("gnt-")
    sent = [h for w in workers for h in w.paths("/generate")]
    assert "abc-1" in {headers["x-request-id"] for headers in sent}


async def test_headers_of_the_gateway_are_not_taken_from_clients(front, workers):
    forged = {
        "x-sylvan-ticket": "forged",
        "x-sylvan-gateway-key": "k",
        "x-sylvan-resume-bytes": "9",
    }
    response = await front.post("/generate", {"text": "x"}, headers=forged)

    assert response.status_code == 200
    [sent] = [h for w in workers for h in w.paths("/generate")]
    assert sent["x-sylvan-ticket"] != "forged"
    assert "x-sylvan-gateway-key" not in sent
    assert "x-sylvan-resume-bytes" not in sent


async def test_hop_by_hop_headers_stay_where_they_are(front, workers):
    headers = {"connection": "keep-alive, x-private", "x-private": "1", "x-public": "2", "te": "x"}
    await front.post("/generate", {"text": "x"}, headers=headers)

    [sent] = [h for w in workers for h in w.paths("/generate")]
    assert "x-private" not in sent
    assert "te" not in sent
    assert sent["x-public"] == "2"


async def test_a_worker_can_be_chosen_by_header(front, workers):
    target = front.runtime.registry.by_url(workers[1].url)
    for name in (target.id, target.url):
        await front.post("/generate", {"text": "x"}, headers={"x-smg-target-worker": name})
    wrong = await front.post("/generate", {"text": "x"}, headers={"x-smg-target-worker": "no"})

    assert served(workers) == [0, 2, 0]
    assert wrong.status_code == 400
    assert "x-smg-target-worker" in wrong.json()["error"]["message"]


async def test_routing_keys_stick(workers):
    async with gateway(*(w.url for w in workers), routing__policy="manual") as front:
        for _ in range(4):
            await front.post("/generate", {"text": "x"}, headers={"x-smg-routing-key": "user-1"})

        assert sorted(served(workers)) == [0, 0, 4]
        assert front.metric("smg_manual_policy_branch_total", branch="sticky") == 3
        assert front.metric("smg_manual_policy_cache_entries") == 1


async def test_models_are_routed_by_name(checkpoint):
    async with (
        scripted(checkpoint, served_model_name="a") as a,
        scripted(checkpoint, served_model_name="b") as b,
        gateway(a.url, b.url) as front,
    ):
        for model in ("b", "b", "a"):
            response = await front.post("/v1/chat/completions", {"model": model, "messages": HELLO})
            assert response.status_code == 200
        unknown = await front.post("/v1/chat/completions", {"model": "c", "messages": HELLO})
        nameless = await front.post("/generate", {"text": "x"})
        models = await front.get("/v1/models")
        one = await front.get("/v1/models/b")

    assert served([a, b]) == [1, 2]
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert nameless.status_code == 400
    assert "there are a, b" in nameless.json()["error"]["message"]
    assert sorted(card["id"] for card in models.json()["data"]) == ["a", "b"]
    assert one.json()["id"] == "b"


async def test_an_overloaded_worker_is_passed_over(checkpoint, workers):
    async def busy(reader, writer):
        await answer_health(reader, writer, "503 Service Unavailable", "retry-after: 1\r\n")

    async with (
        raw(busy) as url,
        gateway(url, workers[0].url, routing__policy="round_robin") as front,
    ):
        for _ in range(12):
            response = await front.post("/generate", {"text": "x"})
            assert response.status_code == 200
        broken = front.runtime.registry.by_url(url)
        assert broken.breaker.failures == 0  # it is busy, not broken


async def answer_health(reader, writer, status, headers=""):
    """Healthy, but every request is answered with a status."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
        if length:
            await reader.readexactly(int(length[0].split(b":")[1]))
        line = "200 OK" if head.startswith(b"GET") else status
        body = b'{"error": "it says so"}'
        writer.write(
            f"HTTP/1.1 {line}\r\n{headers}content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()


async def test_what_all_workers_refuse_reaches_the_client_as_it_is():
    async def broken(reader, writer):
        await answer_health(reader, writer, "500 Internal Server Error", "x-why: because\r\n")

    async with raw(broken) as url, gateway(url, retry__max_tries=3) as front:
        response = await front.post("/generate", {"text": "x"})
        labels = {"worker_type": "regular", "endpoint": "/generate"}

        assert response.status_code == 500
        assert response.json() == {"error": "it says so"}
        assert response.headers["x-why"] == "because"
        assert front.metric("smg_worker_retries_total", **labels) == 2
        assert front.metric("smg_worker_retries_exhausted_total", **labels) == 1


async def test_a_broken_worker_is_left_alone_after_a_while(workers):
    async def broken(reader, writer):
        await answer_health(reader, writer, "500 Internal Server Error")

    async with (
        raw(broken) as url,
        gateway(url, workers[0].url, routing__policy="round_robin", breaker__failures=3) as front,
    ):
        for _ in range(12):
            response = await front.post("/generate", {"text": "x"})
            assert response.status_code == 200
        bad = front.runtime.registry.by_url(url)

        assert bad.breaker.state.value == "open"
        transition = {"worker": url, "from": "closed", "to": "open"}
        assert front.metric("smg_worker_cb_transitions_total", **transition) == 1
        assert front.metric("smg_worker_cb_state", worker=url) == 1


GARBAGE = {
    "not HTTP": b"\x00\x01\x02 what is this\r\n\r\n",
    "a head without an end": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    "a body cut short": b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\nfew bytes",
    "chunks that are none": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nno\r\n",
    "frames that are none": (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-sylvan-journal\r\n"
        b"content-length: 20\r\n\r\n" + b"\xff" * 20
    ),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_of_a_worker_is_its_own_failure(workers, kind):
    async def garbage(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            writer.write(GARBAGE[kind])
        await writer.drain()

    async with (
        raw(garbage) as url,
        gateway(url, workers[0].url, routing__policy="round_robin") as front,
    ):
        for _ in range(4):
            response = await front.post("/generate", {"text": "abc"})
            assert response.status_code == 200, response.text
            assert "text" in response.json()
        assert front.runtime.registry.by_url(url).breaker.failures > 0


async def test_a_worker_that_alone_answers_garbage_gives_502():
    async def garbage(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        good = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        writer.write(good if head.startswith(b"GET") else GARBAGE["not HTTP"])
        await writer.drain()

    async with raw(garbage) as url, gateway(url) as front:
        response = await front.post("/v1/chat/completions", {"messages": HELLO})

    assert response.status_code == 502
    assert "sent invalid HTTP" in response.json()["error"]["message"]


async def test_overload_is_bounded_and_live_requests_are_unharmed(checkpoint):
    async with (
        scripted(checkpoint) as worker,
        gateway(worker.url, limits__max_concurrent=4, limits__queue_size=8) as front,
    ):
        worker.engine.control.script = lambda request, prompt: "word " * 20
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=front.url, limits=limits, timeout=60, verify=False
        ) as client:
            answers = await asyncio.gather(
                *(client.post("/generate", json={"text": f"{i}"}) for i in range(120))
            )

        good = [a for a in answers if a.status_code == 200]
        refused = [a for a in answers if a.status_code == 429]
        assert len(good) + len(refused) == 120
        assert len(good) >= 12
        assert all(a.json()["text"].count("word") == 20 for a in good)
        assert all("retry-after" in a.headers for a in refused)
        assert front.metric("smg_http_rate_limit_total", result="rejected") == len(refused)


async def test_waiting_too_long_is_408(checkpoint):
    async with (
        scripted(checkpoint) as worker,
        gateway(worker.url, limits__max_concurrent=1, limits__queue_timeout_s=0.05) as front,
    ):
        worker.engine.control.hold = True
        first = asyncio.create_task(front.post("/generate", {"text": "x"}))
        await until(lambda: worker.engine.control.requests)
        second = await front.post("/generate", {"text": "y"})
        first.cancel()

    assert second.status_code == 408


async def test_requests_that_take_too_long_end(checkpoint):
    async with (
        scripted(checkpoint) as worker,
        gateway(worker.url, limits__request_timeout_s=0.2) as front,
    ):
        worker.engine.control.hold = True
        response = await front.post("/generate", {"text": "x"})
        await until(lambda: worker.engine.control.aborted)

    assert response.status_code == 504
    assert "longer than 0.2 s" in response.json()["error"]["message"]


async def test_a_client_that_leaves_ends_its_request_at_the_worker(front, workers):
    for worker in workers:
        worker.engine.control.hold = True
    for stream in (True, False):
        task = asyncio.create_task(front.post("/generate", {"text": "x", "stream": stream}))
        await until(lambda: any(w.engine.control.requests for w in workers))
        task.cancel()
        await until(lambda: any(w.engine.control.aborted for w in workers))
        await until(lambda: all(w.load == 0 for w in front.runtime.registry.workers))
        for worker in workers:
            worker.engine.control.requests.clear()
            worker.engine.control.aborted.clear()


async def test_a_slow_reader_costs_no_memory(front, workers):
    for worker in workers:
        worker.engine.control.script = lambda request, prompt: "word " * 300
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 1800}}
    async with front.http.stream("POST", "/generate", json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        await asyncio.sleep(0.3)
        rest = [line async for line in lines if line.startswith("data")]

    assert rest[-1] == "data: [DONE]"
    assert '"type":"stop"' in rest[-2]


async def test_a_client_comes_back_to_its_stream(front, workers):
    for worker in workers:
        worker.engine.control.script = lambda request, prompt: "word " * 200
    body = {"prompt": "x", "max_tokens": 1200, "stream": True}
    ids = {"x-sylvan-event-ids": "1"}
    seen: list[str] = []
    async with front.http.stream("POST", "/v1/completions", json=body, headers=ids) as response:
        async for line in response.aiter_lines():
            seen.append(line)
            if len(seen) > 30 and line.startswith("data: "):
                break
    last = next(line for line in reversed(seen) if line.startswith("id: "))[4:]

    rest = await front.post("/v1/completions", body, headers={"last-event-id": last})
    again = await front.post("/v1/completions", body, headers={"last-event-id": last})

    assert rest.status_code == 200
    assert rest.text == again.text
    lines = [*seen, *rest.text.split("\n")]
    data = [line[6:] for line in lines if line.startswith("data: ")]
    text = "".join(c["text"] for d in data[:-1] for c in json.loads(d)["choices"])
    assert text == "word " * 200
    assert data[-1] == "[DONE]"
    assert sum(served(workers)) == 1  # nothing was computed twice


async def test_a_stream_that_is_not_there_is_gone(front):
    body = {"prompt": "x", "stream": True}
    gone = await front.post("/v1/completions", body, headers={"last-event-id": f"{'0' * 32}-3"})
    odd = await front.post("/v1/completions", body, headers={"last-event-id": "what"})

    assert gone.status_code == 410
    assert odd.status_code == 400


async def test_a_stream_without_reconnection_ends(workers):
    workers[0].engine.control.hold = True
    async with gateway(workers[0].url, failover__resume_s=0.1) as front:
        headers = {"x-sylvan-event-ids": "1"}
        body = {"prompt": "x", "stream": True}
        asked = asyncio.create_task(front.post("/v1/completions", body, headers=headers))
        await until(lambda: workers[0].engine.control.requests)
        asked.cancel()
        await until(lambda: workers[0].engine.control.aborted)


async def test_errors_of_streams_with_ids_keep_their_shape(front):
    body = {"prompt": "x", "stream": True, "top_p": 9}
    response = await front.post("/v1/completions", body, headers={"x-sylvan-event-ids": "1"})

    assert response.status_code == 400
    assert "top_p" in response.json()["error"]["message"]


async def test_requests_are_aborted_by_name_where_they_run(front, workers):
    for worker in workers:
        worker.engine.control.hold = True
    asked = asyncio.create_task(front.post("/generate", {"text": "x", "rid": "mine"}))
    await until(lambda: any(w.engine.control.requests for w in workers))

    done = await front.post("/abort_request", {"rid": "mine"})
    response = await asked

    assert done.status_code == 200
    assert response.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert sum(len(w.engine.control.aborted) for w in workers) == 1


async def test_a_command_that_all_workers_refuse_is_the_clients_fault(front):
    for body in ({"rid": []}, {"rid": "x" * 300}):
        response = await front.post("/abort_request", body)
        assert response.status_code == 400, response.text
        told = response.json()
        assert told["status"] == "failed"
        assert all("rid" in str(worker["answer"]) for worker in told["workers"])


async def test_commands_go_to_all_and_tell_what_each_did(front, workers):
    workers[1].engine.control.busy = True
    response = await front.post("/flush_cache", {})

    assert response.status_code == 207
    told = response.json()
    assert told["status"] == "partial_success"
    status = {w["url"]: w["status"] for w in told["workers"]}
    assert [status[w.url] for w in workers] == [200, 400, 200]


async def test_stored_responses_are_found_wherever_they_are(front, workers):
    made = [(await front.post("/v1/responses", BODIES["/v1/responses"])).json() for _ in range(3)]
    assert served(workers) == [1, 1, 1]

    for response in made:
        got = await front.get(f"/v1/responses/{response['id']}")
        assert got.json()["id"] == response["id"]
        follow = {"model": "m", "input": "and?", "previous_response_id": response["id"]}
        assert (await front.post("/v1/responses", follow)).status_code == 200
        assert (await front.http.delete(f"/v1/responses/{response['id']}")).status_code == 200
        assert (await front.get(f"/v1/responses/{response['id']}")).status_code == 404


async def test_sessions_and_files_stay_with_one_worker(front):
    opened = await front.post("/open_session", {"capacity_of_str_len": 100})
    for _ in range(3):
        turn = {"text": "abc", "session_params": {"id": opened.json()}}
        assert (await front.post("/generate", turn)).status_code == 200
    upload = await front.http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}\n")}
    )
    listed = await front.get("/v1/files")
    content = await front.get(f"/v1/files/{upload.json()['id']}/content")

    assert [f["id"] for f in listed.json()["data"]] == [upload.json()["id"]]
    assert content.content == b"{}\n"


async def test_loads_models_and_information_are_merged(front, workers):
    loads = (await front.get("/v1/loads")).json()
    short = (await front.get("/get_loads")).json()
    info = (await front.get("/get_server_info")).json()
    model = (await front.get("/get_model_info")).json()
    tags = (await front.get("/api/tags")).json()
    metrics = (await front.get("/engine_metrics")).text

    assert {row["worker"] for row in loads["loads"]} == {w.url for w in workers}
    assert [row["dp_rank"] for row in loads["loads"]] == [0, 1, 2]
    assert [row["load"] for row in short["workers"]] == [0, 0, 0]
    assert len(info["internal_states"]) == 3
    assert info["gateway"]["settings"]["routing"]["policy"] == "round_robin"
    assert model["served_model_name"] == "scripted"
    assert len(tags["models"]) == 1
    assert metrics.count("# TYPE sglang:num_running_reqs gauge") == 1
    assert f'worker_addr="{workers[2].url}"' in metrics


async def test_tenants_have_keys_budgets_and_namespaces(workers, tmp_path):
    from hashlib import sha256
    from json import dumps

    keys = [
        {"sha256": sha256(b"ka").hexdigest(), "tenant": "a"},
        {"sha256": sha256(b"kb").hexdigest(), "tenant": "b", "requests_per_minute": 2},
    ]
    path = tmp_path / "keys.json"
    path.write_text(dumps({"keys": keys}))
    async with gateway(workers[0].url, server__api_key_file=str(path)) as front:

        async def ask(key):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return await front.post("/generate", {"text": "x"}, headers=headers)

        assert (await ask("")).status_code == 401
        assert (await ask("wrong")).status_code == 401
        assert (await ask("ka")).status_code == 200
        spent = [(await ask("kb")).status_code for _ in range(3)]
        forbidden = await front.get("/workers", headers={"authorization": "Bearer ka"})

    assert spent == [200, 200, 429]
    assert forbidden.status_code == 403
    assert [r.tenant for r in workers[0].engine.control.requests] == ["a", "b", "b"]
    assert all("authorization" not in h for h in workers[0].paths("/generate"))


async def test_workers_get_their_own_keys(checkpoint):
    async with (
        scripted(checkpoint, api_key=Secret("wk")) as worker,
        gateway(worker.url, server__api_key=Secret("gk"), workers__api_key=Secret("wk")) as front,
    ):
        good = await front.post("/generate", {"text": "x"}, headers={"authorization": "Bearer gk"})
        bad = await front.post("/generate", {"text": "x"}, headers={"authorization": "Bearer wk"})

    assert good.status_code == 200
    assert bad.status_code == 401
    assert worker.paths("/generate")[0]["authorization"] == "Bearer wk"


async def test_without_keys_of_its_own_the_gateway_passes_keys_on(checkpoint):
    async with (
        scripted(checkpoint, api_key=Secret("wk")) as worker,
        gateway(worker.url) as front,
    ):
        good = await front.post("/generate", {"text": "x"}, headers={"x-api-key": "wk"})
        bad = await front.post("/generate", {"text": "x"})

    assert (good.status_code, bad.status_code) == (200, 401)


async def test_operators_have_keys_and_roles(workers):
    keys = (Secret("1:ann:admin:ka"), Secret("2:bob:user:kb"))
    async with gateway(workers[0].url, control__api_keys=keys) as front:

        async def status(key):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return (await front.get("/workers", headers=headers)).status_code

        assert [await status(k) for k in ("", "x", "kb", "ka")] == [401, 401, 403, 200]


async def test_web_pages_of_others_may_not_steer(workers):
    async with gateway(workers[0].url) as front:
        headers = {"origin": "https://evil.example"}
        assert (await front.get("/workers", headers=headers)).status_code == 403


async def test_readiness_turns_when_draining(front):
    assert (await front.get("/ready")).status_code == 200
    await front.runtime.drain(0.0)
    assert (await front.get("/ready")).json()["status"] == "draining"


async def test_metrics_have_the_families_of_the_reference(front):
    await front.post("/v1/chat/completions", {"model": "m", "messages": HELLO, "stream": True})
    way = {
        "router_type": "http",
        "backend_type": "regular",
        "connection_mode": "http",
        "model_id": "scripted",
        "endpoint": "/v1/chat/completions",
    }

    assert front.metric("smg_router_requests_total", **way, streaming="true") == 1
    assert front.metric("smg_router_ttft_seconds_count", **way) == 1
    assert front.metric("smg_router_tpot_seconds_count", **way) == 1
    assert front.metric("smg_router_tokens_total", **way, token_type="output") > 5
    assert front.metric("smg_worker_pool_size", worker_type="regular", connection_mode="http",
                        model_id="scripted") == 3  # fmt: skip
    assert front.metric("smg_worker_health", worker=front.runtime.registry.workers[0].url) == 1
    assert front.metric("smg_http_responses_total", status_code="200", error_code="") >= 1


def test_adapters_of_tenants_are_for_servers_to_check(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"sha256": "0" * 64, "tenant": "a", "adapters": []}]}))
    with pytest.raises(ConfigError, match="adapters of 'a' are checked by servers"):
        client_keys(str(path))


async def test_the_page_of_the_gateway_knows_whose_it_is(workers):
    key = Secret("key")
    async with gateway(workers[0].url, server__api_key=key) as front:
        page = await front.get("/ui")
        known = await front.get("/ui/app.js", headers={"if-none-match": '"x"'})
        slash = await front.get("/ui/")
        other = await front.get("/ui/nothing.js")
        again = await front.get("/ui", headers={"if-none-match": page.headers["etag"]})

    assert page.status_code == 200
    assert 'data-site="gateway"' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert known.status_code == 200
    assert (slash.status_code, slash.headers["location"]) == (308, "../ui")
    assert other.status_code == 404
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1:30000", 200),  # the gateway's own page
        ("http://localhost:30000", "localhost:30000", 200),
        ("https://chat.example", "127.0.0.1:30000", 200),  # one that the operator named
        ("https://evil.example", "127.0.0.1:30000", 403),
        ("http://evil.example:30000", "evil.example:30000", 403),  # its name points to us
        ("null", "127.0.0.1:30000", 403),
    ],
)
async def test_a_worker_without_a_key_answers_pages_of_the_gateway_only(
    workers, origin, host, status
):
    origins = ("https://chat.example",)
    async with gateway(workers[0].url, server__cors_origins=origins) as front:
        headers = {"origin": origin, "host": host, "sec-fetch-site": "same-origin"}
        answer = await front.post("/v1/chat/completions", {"messages": HELLO}, headers=headers)

    assert answer.status_code == status
    for sent in workers[0].paths("/v1/chat/completions"):
        assert ("origin" in sent) == (status == 403)


async def test_pages_of_a_gateway_with_a_key_have_names(workers):
    headers = {"origin": "https://llm.example", "host": "llm.example"}
    async with gateway(workers[0].url, server__api_key=Secret("key")) as front:
        keyed = headers | {"authorization": "Bearer key"}
        body = {"messages": HELLO}
        allowed = await front.post("/v1/chat/completions", body, headers=keyed)
        refused = await front.post("/v1/chat/completions", body, headers=headers)

    assert (allowed.status_code, refused.status_code) == (200, 401)
