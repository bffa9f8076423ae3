"""Responses and conversations that a gateway keeps for upstreams that need not."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import asynccontextmanager

import httpx
import msgspec
import openai
import pytest

from sylvan.config.route import ProvidersConfig
from sylvan.config.values import Secret
from tests.support.cluster import QUICK, events, gateway, raw, scripted
from tests.support.scripted import write_checkpoint


def last_words(request, prompt):
    """Every message that the model was shown, in one line."""
    return "|".join(part.split("<|im_end|>")[0] for part in prompt.split("<|im_start|>")[1:-1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@asynccontextmanager
async def forgetful(checkpoint, **settings):
    """An upstream that keeps nothing."""
    async with scripted(checkpoint, response_store_size=0, **settings) as worker:
        worker.engine.control.script = last_words
        yield worker


@asynccontextmanager
async def keeping(tmp_path, *upstreams, history="memory", providers=None, **changes):
    """A gateway with a history."""
    file = tmp_path / "providers.json"
    file.write_text(json.dumps({"upstreams": upstreams}))
    config = ProvidersConfig(file=str(file), history=history, **(providers or {}))
    base = msgspec.structs.replace(QUICK, providers=config)
    async with gateway(wait=0, base=base, **changes) as front:
        async with asyncio.timeout(30):
            while (await front.get("/readiness")).status_code != 200:
                await asyncio.sleep(0.02)
        yield front


def at(worker, *models):
    return {"url": f"{worker.url}/v1", "models": list(models) or ["scripted"]}


def text_of(reply):
    return reply["output"][-1]["content"][0]["text"]


async def ask(front, text, **fields):
    return await front.post("/v1/responses", {"model": "scripted", "input": text, **fields})


async def test_a_response_continues_at_another_upstream(checkpoint, tmp_path):
    async with (
        forgetful(checkpoint) as a,
        forgetful(checkpoint, served_model_name="other") as b,
        keeping(tmp_path, at(a), at(b, "other")) as front,
    ):
        first = (await ask(front, "one")).json()
        second = (await ask(front, "two", model="other", previous_response_id=first["id"])).json()
        third = (await ask(front, "three", previous_response_id=second["id"])).json()
        kept = (await front.get(f"/v1/responses/{second['id']}")).json()
        listed = (
            await front.get(f"/v1/responses/{third['id']}/input_items?order=asc&limit=3")
        ).json()
    assert text_of(first) == "user\none"
    assert text_of(second) == "user\none|assistant\nuser\none|user\ntwo"
    assert text_of(third).endswith("user\ntwo|assistant\n" + text_of(second) + "|user\nthree")
    assert second["previous_response_id"] == first["id"]
    assert second["store"] is True
    assert kept == second
    assert [item["type"] for item in listed["data"]] == ["message"] * 3
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert listed["has_more"] is True
    assert (len(a.engine.control.requests), len(b.engine.control.requests)) == (2, 1)


async def test_streams_are_kept_and_otherwise_untouched(checkpoint, tmp_path):
    async with (
        forgetful(checkpoint) as a,
        keeping(tmp_path, at(a)) as front,
        httpx.AsyncClient() as direct,
    ):
        body = {"model": "scripted", "input": "one", "stream": True, "request_id": "resp_same"}
        expected = await direct.post(f"{a.url}/v1/responses", json=body)
        found = await front.post("/v1/responses", body)
        kept = await front.get("/v1/responses/resp_same")
        more = await ask(front, "two", previous_response_id="resp_same", stream=True)
    own, ours = events(expected.text), events(found.text)
    assert [e["type"] for e in ours] == [e["type"] for e in own]
    deltas = [e["delta"] for e in ours if e["type"] == "response.output_text.delta"]
    assert deltas == [e["delta"] for e in own if e["type"] == "response.output_text.delta"]
    assert kept.json() == ours[-1]["response"]
    assert kept.json()["store"] is True
    last = events(more.text)[-1]["response"]
    assert text_of(last) == "user\none|assistant\nuser\none|user\ntwo"
    assert all(
        e["response"]["previous_response_id"] == "resp_same"
        for e in events(more.text)
        if "response" in e
    )


async def test_conversations_grow_with_their_responses(checkpoint, tmp_path):
    async with forgetful(checkpoint) as a, keeping(tmp_path, at(a)) as front:
        client = openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none")
        made = await client.conversations.create(
            metadata={"topic": "x"}, items=[{"role": "user", "content": "zero"}]
        )
        first = await client.responses.create(
            model="scripted", input="one", conversation=made.id, store=False
        )
        assert first.output_text == "user\nzero|user\none"
        await client.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": "two"}]
        )
        items = [i async for i in client.conversations.items.list(made.id, order="asc", limit=2)]
        assert [i.role for i in items] == ["user", "user", "assistant", "user"]
        got = await client.conversations.items.retrieve(items[2].id, conversation_id=made.id)
        assert got.id == items[2].id
        await client.conversations.items.delete(items[2].id, conversation_id=made.id)
        changed = await client.conversations.update(made.id, metadata={"topic": "y"})
        assert changed.metadata == {"topic": "y"}
        second = await client.responses.create(
            model="scripted", input="three", conversation={"id": made.id}
        )
        assert second.output_text == "user\nzero|user\none|user\ntwo|user\nthree"
        assert second.conversation.id == made.id
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)
        assert (await client.responses.retrieve(second.id)).id == second.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)  # store was false
        await client.close()


async def test_what_cannot_be_gone_on_from_is_named(checkpoint, tmp_path):
    async with forgetful(checkpoint) as a, keeping(tmp_path, at(a)) as front:
        made = (await front.post("/v1/conversations", {})).json()["id"]
        wrong = [
            ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
            ({"conversation": "conv_none"}, 404, "conversation"),
            ({"conversation": {"id": 1}}, 400, "conversation.id"),
            ({"previous_response_id": 1}, 400, "previous_response_id"),
            ({"conversation": made, "previous_response_id": "resp_1"}, 400, "conversation"),
            ({"background": True, "store": False}, 400, "background"),
            ({"background": True, "stream": True}, 400, "stream"),
            ({"store": "yes"}, 400, "store"),
            ({"input": ""}, 400, "input"),
            ({"input": [{"role": "user", "content": "x"}, 7]}, 400, "input[1]"),
            ({"input": {"role": "user"}}, 400, "input"),
        ]
        for fields, status, param in wrong:
            reply = await front.post("/v1/responses", {"model": "scripted", "input": "x", **fields})
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
        assert a.engine.control.requests == []
        for path, query, status in [
            (f"/v1/conversations/{made}/items", "?limit=0", 400),
            (f"/v1/conversations/{made}/items", "?limit=x", 400),
            (f"/v1/conversations/{made}/items", "?order=up", 400),
            (f"/v1/conversations/{made}/items", "?after=item_none", 400),
            (f"/v1/conversations/{made}/items/none", "", 404),
            ("/v1/conversations/conv_none", "", 404),
            ("/v1/responses/resp_none", "", 404),
            ("/v1/responses/resp_none/input_items", "", 404),
        ]:
            assert (await front.get(path + query)).status_code == status
        for body in ({"items": [7]}, {"metadata": {"a": 1}}, {"items": "x"}, []):
            assert (await front.post("/v1/conversations", body)).status_code == 400
        assert (await front.http.post("/v1/conversations", content=b"{")).status_code == 400


async def test_a_response_in_the_background_is_read_and_cancelled(checkpoint, tmp_path):
    async with forgetful(checkpoint) as a, keeping(tmp_path, at(a)) as front:
        begun = (await ask(front, "one", background=True)).json()
        assert begun["status"] == "queued"
        path = f"/v1/responses/{begun['id']}"
        async with asyncio.timeout(30):
            while (done := (await front.get(path)).json())["status"] != "completed":
                assert done["status"] in ("queued", "in_progress")
                await asyncio.sleep(0.01)
        assert (done["id"], text_of(done)) == (begun["id"], "user\none")
        more = await ask(front, "two", previous_response_id=begun["id"])
        assert text_of(more.json()).endswith("user\ntwo")

        a.engine.control.hold = True
        held = (await ask(front, "three", background=True)).json()["id"]
        async with asyncio.timeout(30):
            while len(a.engine.control.requests) < 3:
                await asyncio.sleep(0.01)
        ended = await front.post(f"/v1/responses/{held}/cancel", {})
        assert ended.json()["status"] == "cancelled"
        async with asyncio.timeout(30):
            while not a.engine.control.aborted:
                await asyncio.sleep(0.01)
        again = await front.post(f"/v1/responses/{held}/cancel", {})
        assert again.json()["status"] == "cancelled"
        assert (await front.http.delete(f"/v1/responses/{held}")).json()["deleted"] is True
        assert (await front.get(f"/v1/responses/{held}")).status_code == 404


async def test_what_fails_in_the_background_says_why(checkpoint, tmp_path):
    async def garbage(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async with raw(garbage) as url, forgetful(checkpoint) as a:
        odd = {"url": f"{url}/v1", "models": ["odd"]}
        lost = {"url": "http://127.0.0.1:9/v1", "models": ["lost"]}
        async with keeping(tmp_path, at(a), odd, lost) as front:
            for fields, why in [
                ({"model": "lost"}, "cannot be reached"),
                ({"model": "odd"}, "The upstream server sent no response"),
                ({"temperature": -1}, "temperature"),
            ]:
                begun = (await ask(front, "x", background=True, **fields)).json()
                path = f"/v1/responses/{begun['id']}"
                async with asyncio.timeout(30):
                    while (got := (await front.get(path)).json())["status"] != "failed":
                        await asyncio.sleep(0.01)
                assert why in got["error"]["message"]


async def test_answers_that_are_no_responses_are_passed_on(tmp_path):
    async def odd(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
        )
        await writer.drain()

    async def refusing(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error": {"message": "no"}}'
        head = f"HTTP/1.1 422 No\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()

    async with raw(odd) as a, raw(refusing) as b:
        one, two = {"url": a, "models": ["scripted"]}, {"url": b, "models": ["refusing"]}
        async with keeping(tmp_path, one, two) as front:
            reply = await ask(front, "x")
            assert (reply.status_code, reply.text) == (200, "hello")
            reply = await ask(front, "x", model="refusing")
            assert (reply.status_code, reply.json()) == (422, {"error": {"message": "no"}})


async def test_events_may_come_in_any_pieces(tmp_path):
    reply = {"id": "resp_x", "object": "response", "status": "completed", "output": []}
    last = json.dumps({"type": "response.completed", "response": reply})
    text = f"event: a\r\ndata: {{}}\r\n\r\nevent: response.completed\ndata: {last}\n\n".encode()

    async def piecemeal(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(head + b"\r\n\r\n")
        for i in range(len(text)):
            writer.write(b"1\r\n" + text[i : i + 1] + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with (
        raw(piecemeal) as url,
        keeping(tmp_path, {"url": url, "models": ["scripted"]}) as front,
    ):
        found = await ask(front, "x", stream=True)
        kept = (await front.get("/v1/responses/resp_x")).json()
    assert found.text.startswith("event: a\r\ndata: {}\r\n\r\nevent: response.completed\ndata: ")
    assert events(found.text.replace("\r\n", "\n"))[-1]["response"] == kept
    assert kept["store"] is True


async def test_thinking_that_only_its_maker_can_read_is_not_sent_to_others(tmp_path):
    asked = []
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    sealed = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"}
    said = {"type": "message", "role": "assistant", "content": []}
    reply = {"id": "resp_x", "status": "completed", "output": [thought, sealed, said]}

    async def noting(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        asked.append((head, json.loads(await reader.readexactly(size))))
        body = json.dumps(reply).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    async with raw(noting) as url, keeping(tmp_path, {"url": url, "models": ["scripted"]}) as front:
        body = {"model": "scripted", "input": "a", "x": 1}
        await front.post("/v1/responses", body, headers={"accept-encoding": "gzip"})
        await ask(front, "b", previous_response_id="resp_x")
    (head, first), (_, second) = asked
    assert first == {"model": "scripted", "input": "a", "x": 1}
    assert b"accept-encoding: gzip" not in head.lower()
    assert "previous_response_id" not in second
    assert [item.get("id") or item["content"] for item in second["input"]] == ["a", "rs_2", [], "b"]


async def test_owners_see_their_own_only(checkpoint, tmp_path):
    async with forgetful(checkpoint) as a:
        async with keeping(tmp_path, at(a)) as front:
            mine, yours = ({"authorization": f"Bearer {k}"} for k in ("mine", "yours"))
            body = {"model": "scripted", "input": "x"}
            name = (await front.post("/v1/responses", body, headers=mine)).json()["id"]
            for headers, status in [(mine, 200), (yours, 404), ({}, 404)]:
                reply = await front.get(f"/v1/responses/{name}", headers=headers)
                assert reply.status_code == status
        async with keeping(tmp_path, at(a), server__api_key=Secret("k")) as front:
            assert (await front.get("/v1/responses/resp_x")).status_code == 401
            assert (await front.post("/v1/conversations", {})).status_code == 401


async def test_a_file_outlives_the_gateway(checkpoint, tmp_path):
    file = tmp_path / "sub" / "history.db"
    settings = {"history_file": str(file)}
    async with forgetful(checkpoint) as a:
        async with keeping(tmp_path, at(a), history="sqlite", providers=settings) as front:
            name = (await ask(front, "one")).json()["id"]
            a.engine.control.hold = True
            held = (await ask(front, "two", background=True)).json()["id"]
            async with asyncio.timeout(30):
                while len(a.engine.control.requests) < 2:
                    await asyncio.sleep(0.01)
            labels = {"storage_type": "sqlite"}
            assert front.metric("smg_db_items_stored", **labels) == 2
            done = front.metric(
                "smg_db_operations_total", **labels, operation="put_response", result="success"
            )
            assert done == 2
        a.engine.control.hold = False
        assert file.stat().st_mode & 0o077 == 0
        async with keeping(tmp_path, at(a), history="sqlite", providers=settings) as front:
            again = await ask(front, "two", previous_response_id=name)
            assert text_of(again.json()) == "user\none|assistant\nuser\none|user\ntwo"
            lost = (await front.get(f"/v1/responses/{held}")).json()
            assert lost["status"] == "failed"
            assert "stopped before the response was complete" in lost["error"]["message"]


async def test_two_gateways_share_a_file(checkpoint, tmp_path):
    settings = {"history_file": str(tmp_path / "history.db")}
    async with (
        forgetful(checkpoint) as a,
        keeping(tmp_path, at(a), history="sqlite", providers=settings) as one,
        keeping(tmp_path, at(a), history="sqlite", providers=settings) as two,
    ):
        made = (await one.post("/v1/conversations", {})).json()["id"]
        asked = [ask(g, str(i), conversation=made) for i in range(4) for g in (one, two)]
        replies = await asyncio.gather(*asked)
        items = (await two.get(f"/v1/conversations/{made}/items?limit=100")).json()["data"]
    assert [reply.status_code for reply in replies] == [200] * 8
    assert len(items) == len({item["id"] for item in items}) == 16


async def test_the_oldest_go_of_the_owner_that_has_most(checkpoint, tmp_path):
    async with forgetful(checkpoint) as a:
        async with keeping(tmp_path, at(a), providers={"history_entries": 3}) as front:

            async def put(key):
                body = {"model": "scripted", "input": "x"}
                headers = {"authorization": f"Bearer {key}"}
                return (await front.post("/v1/responses", body, headers=headers)).json()["id"]

            names = [("one", await put("one")), *[("many", await put("many")) for _ in range(4)]]
            found = [
                await front.get(f"/v1/responses/{name}", headers={"authorization": f"Bearer {key}"})
                for key, name in names
            ]
        assert [reply.status_code for reply in found] == [200, 404, 404, 200, 200]
        async with keeping(tmp_path, at(a), providers={"history_max_bytes": 1000}) as front:
            reply = await ask(front, "x" * 1000)
            assert reply.json()["store"] is False  # it was answered, and is too large to be kept
            assert (await front.get(f"/v1/responses/{reply.json()['id']}")).status_code == 404


async def test_old_ones_are_forgotten(checkpoint, tmp_path):
    file = tmp_path / "history.db"
    settings = {"history_file": str(file), "retention_days": 1.0}
    async with (
        forgetful(checkpoint) as a,
        keeping(tmp_path, at(a), history="sqlite", providers=settings) as front,
    ):
        name = (await ask(front, "one")).json()["id"]
        with sqlite3.connect(file) as db:
            db.execute("UPDATE records SET kept_at = kept_at - 86400")
        db.close()
        assert (await front.get(f"/v1/responses/{name}")).status_code == 404


async def test_a_broken_history_costs_no_answers(checkpoint, tmp_path):
    file = tmp_path / "history.db"
    settings = {"history_file": str(file)}
    async with (
        forgetful(checkpoint) as a,
        keeping(tmp_path, at(a), history="sqlite", providers=settings) as front,
    ):
        with sqlite3.connect(file) as db:
            db.execute("DROP TABLE records")
        db.close()
        reply = await ask(front, "one")
        assert (reply.status_code, text_of(reply.json())) == (200, "user\none")
        assert reply.json()["store"] is False
        assert (await front.get("/v1/responses/resp_x")).status_code == 503
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
        assert (await front.post("/v1/chat/completions", chat)).status_code == 200
