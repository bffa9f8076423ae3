"""Prefill and decode workers that serve requests together: upstreams that record what they get."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import orjson
import pytest

from sylvan.gateway.http.pairs.bootstrap import without_rendezvous
from tests.support.cluster import Elsewhere, events, gateway, served, until

HELLO = [{"role": "user", "content": "Hello"}]
JSON = [(b"content-type", b"application/json")]


@dataclass
class Upstream:
    """A worker that records bodies and follows a script.

    Attributes:
        answer: Of POST requests: status, and JSON or the events of a stream.
        hold: Never answers.
        cut_after: Closes the connection after so many events.
        left: Requests whose client went away.
    """

    answer: tuple[int, object] = (200, {"ok": True})
    hold: bool = False
    cut_after: int | None = None
    dp_size: int = 1
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    left: int = 0

    async def __call__(self, scope, receive, send):
        if scope["method"] == "GET":
            models = [{"id": "m"}]
            about = {"data": models, "dp_size": self.dp_size, "loads": []}
            await self._reply(send, 200, about)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(json.loads(body))
        self.paths.append(scope["path"])
        if self.hold:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left += 1
            return
        status, content = self.answer
        if isinstance(content, list) and self.bodies[-1].get("stream"):
            await self._stream(send, content)
        else:
            await self._reply(send, status, content)

    async def _reply(self, send, status, content):
        await send({"type": "http.response.start", "status": status, "headers": JSON})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    async def _stream(self, send, content):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        whole = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in content)
        whole += b"data: [DONE]\n\n"
        for start in range(0, len(whole), 7):  # events come in pieces
            await send(
                {"type": "http.response.body", "body": whole[start : start + 7], "more_body": True}
            )
            if self.cut_after is not None and start > self.cut_after:
                raise ConnectionError("cut")
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


class Slot:
    """A server that is what a test puts there."""

    def __init__(self):
        self.upstream = Upstream()

    async def __call__(self, scope, receive, send):
        await self.upstream(scope, receive, send)


@pytest.fixture(scope="module")
def slots():
    elsewhere = Elsewhere()
    made = [Slot() for _ in range(4)]
    for slot in made:
        slot.url = elsewhere.enter(served(slot))
    yield made
    elsewhere.close()


@pytest.fixture
def pairs(slots):
    """Makes a gateway in front of these."""

    @asynccontextmanager
    async def made(prefills, decodes, others=(), **changes):
        workers = [*prefills, *decodes, *others]
        for slot, worker in zip(slots, workers, strict=False):
            slot.upstream, worker.url = worker, slot.url
        ports = [f"{worker.url}#{9000 + i}" for i, worker in enumerate(prefills)]
        if prefills:
            ports[0] = prefills[0].url  # one without a port
        changes.setdefault("wait", len(prefills) + len(decodes))
        urls = {
            "workers__prefill_urls": tuple(ports),
            "workers__decode_urls": tuple(w.url for w in decodes),
        }
        async with gateway(**(urls if decodes else {}), **changes) as front:
            yield front

    return made


async def test_both_get_the_same_body_and_the_answer_is_the_decode_workers(pairs):
    prefill, decode = Upstream(answer=(200, {"by": "p"})), Upstream(answer=(200, {"by": "d"}))
    async with pairs([prefill], [decode]) as front:
        replies = [await front.post("/generate", {"text": "abc"}) for _ in range(2)]
        loads = [w.load + w.queued_tokens for w in front.runtime.registry.workers]

    assert [reply.json() for reply in replies] == [{"by": "d"}] * 2
    assert prefill.bodies == decode.bodies
    first, second = decode.bodies
    assert first["text"] == "abc"
    assert first["bootstrap_host"] == "127.0.0.1"
    assert first["bootstrap_port"] is None
    assert 0 <= first["bootstrap_room"] < 2**63
    assert first["bootstrap_room"] != second["bootstrap_room"]
    assert loads == [0, 0]


async def test_the_bootstrap_port_of_a_prefill_worker_is_reported(pairs):
    prefills, decode = [Upstream(), Upstream()], Upstream()
    async with pairs(prefills, [decode], routing__prefill_policy="round_robin") as front:
        for _ in range(2):
            await front.post("/v1/chat/completions", {"messages": HELLO})
        chosen = {
            kind: front.metric(
                "smg_worker_selection_total",
                worker_type=kind,
                connection_mode="http",
                model_id="any",
                policy=policy,
            )
            for kind, policy in (("prefill", "round_robin"), ("decode", "cache_aware"))
        }

    assert [p.bodies[0]["bootstrap_port"] for p in prefills] == [None, 9001]
    assert {body["bootstrap_port"] for body in decode.bodies} == {None, 9001}
    assert chosen == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize(
    ("path", "body", "size"),
    [
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/generate", {"input_ids": [[1], [2]]}, 2),
        ("/generate", {"input_ids": [1, 2]}, None),
        ("/generate", {"text": ["a"]}, 1),
        ("/generate", {"text": []}, None),
        ("/v1/completions", {"prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"prompt": [5, 6]}, None),
        ("/v1/chat/completions", {"messages": HELLO, "n": 3}, 3),
        ("/v1/chat/completions", {"messages": HELLO, "n": 1}, None),
        ("/v1/chat/completions", {"messages": HELLO, "n": 10**12}, None),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "model": "m"}, None),
    ],
)
async def test_batches_get_a_room_for_each_prompt(pairs, path, body, size):
    prefill, decode = Upstream(), Upstream()
    async with pairs([prefill], [decode]) as front:
        assert (await front.post(path, body)).status_code == 200

    [sent] = decode.bodies
    assert prefill.bodies == [sent]
    rooms = sent["bootstrap_room"]
    if size is None:
        assert isinstance(rooms, int)
        return
    assert len(set(rooms)) == size
    assert sent["bootstrap_host"] == ["127.0.0.1"] * size
    assert sent["bootstrap_port"] == [None] * size


async def test_fields_that_a_client_made_up_are_replaced(pairs):
    prefill, decode = Upstream(), Upstream()
    async with pairs([prefill], [decode]) as front:
        forged = {"text": "x", "bootstrap_host": "evil", "bootstrap_room": 1, "bootstrap_port": 2}
        await front.post("/generate", forged)

    assert prefill.bodies == decode.bodies
    assert decode.bodies[0]["bootstrap_host"] == "127.0.0.1"
    assert decode.bodies[0]["bootstrap_room"] != 1


def meta(**info):
    return {"text": "t", "meta_info": info}


def test_a_worker_that_continues_alone_without_others():
    raw = b'{"text": "x",  "bootstrap_room": 5, "bootstrap_host": "h"}'

    assert orjson.loads(without_rendezvous(raw, orjson.loads(raw))) == {"text": "x"}
    assert without_rendezvous(b'{"text":  "x"}', {"text": "x"}) == b'{"text":  "x"}'


async def test_log_probabilities_of_the_prompt_come_from_the_prefill_worker(pairs):
    prompt = {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]], "input_top_logprobs": [7]}
    prefill = Upstream(answer=(200, meta(**prompt, output_token_logprobs=[[-9, 9, None]])))
    decode = Upstream(
        answer=(200, meta(input_token_logprobs=[[-0.7, 3, None]], output_token_logprobs=[1]))
    )
    async with pairs([prefill], [decode]) as front:
        one = await front.post("/generate", {"text": "x", "return_logprob": True})
        prefill.answer = (200, [meta(**prompt), meta(input_token_logprobs=[[0, 5, None]])])
        decode.answer = (200, [meta(input_token_logprobs=[]), meta()])
        two = await front.post("/generate", {"text": ["x", "y"], "return_logprob": True})
        without = await front.post("/generate", {"text": "x"})

    info = one.json()["meta_info"]
    assert [row[1] for row in info["input_token_logprobs"]] == [1, 2, 3]
    assert info["input_top_logprobs"] == [7]
    assert info["output_token_logprobs"] == [1]
    assert [len(reply["meta_info"]["input_token_logprobs"]) for reply in two.json()] == [2, 1]
    assert without.json() == [meta(input_token_logprobs=[]), meta()]


async def test_streams_get_log_probabilities_of_the_prompt_in_their_events(pairs):
    prompt = [[None, 1, None], [-0.5, 2, None]]
    prefill = Upstream(answer=(200, [meta(input_token_logprobs=prompt)]))
    parts = [meta(input_token_logprobs=[]), meta(more=1), meta(input_token_logprobs=[])]
    decode = Upstream(answer=(200, parts))
    async with pairs([prefill], [decode]) as front:
        body = {"text": "x", "return_logprob": True, "stream": True}
        merged = await front.post("/generate", body)
        plain = await front.post("/generate", {"text": "x", "stream": True})

    *got, done = events(merged.text)
    assert done == "[DONE]"
    assert [part["meta_info"].get("input_token_logprobs") for part in got] == [prompt, None, prompt]
    assert events(plain.text) == [*parts, "[DONE]"]


async def test_a_refusal_of_the_prefill_worker_is_the_answer(pairs):
    prefill = Upstream(answer=(400, {"error": {"message": "too long"}}))
    decode = Upstream(hold=True)
    async with pairs([prefill], [decode]) as front:
        reply = await front.post("/generate", {"text": "x"})
        await until(lambda: decode.left == 1)  # it does not wait for what never comes
        failures = [w.breaker.failures for w in front.runtime.registry.workers]

    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "too long")
    assert failures == [0, 0]


async def test_a_refusal_of_the_decode_worker_is_the_answer(pairs):
    prefill = Upstream(hold=True)
    decode = Upstream(answer=(413, {"error": {"message": "no room"}}))
    async with pairs([prefill], [decode]) as front:
        reply = await front.post("/generate", {"text": "x"}, timeout=30)

    assert (reply.status_code, reply.json()["error"]["message"]) == (413, "no room")


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_another_pair_is_tried_when_one_fails(pairs, side):
    good = {"prefill": [Upstream(), Upstream()], "decode": [Upstream(), Upstream()]}
    for bad in good[side]:
        bad.answer = (500, {"error": "broken"})
    good[side][1].answer = (200, {"ok": True})
    changes = {"routing__policy": "round_robin"}
    async with pairs(good["prefill"], good["decode"], **changes) as front:
        replies = [await front.post("/generate", {"text": "x"}) for _ in range(3)]
        retried = front.metric("smg_worker_retries_total", worker_type=side, endpoint="/generate")
        blamed = {
            worker.url: worker.breaker.failures > 0 for worker in front.runtime.registry.workers
        }

    assert [reply.status_code for reply in replies] == [200] * 3
    assert retried >= 1
    assert [url for url, bad in blamed.items() if bad] == [good[side][0].url]


async def test_a_stream_that_the_decode_worker_breaks_ends_with_an_error(pairs):
    parts = [{"choices": [{"index": 0, "delta": {"content": "abc"}}]}] * 5
    decode = Upstream(answer=(200, parts), cut_after=60)
    async with pairs([Upstream()], [decode]) as front:
        reply = await front.post("/v1/chat/completions", {"messages": HELLO, "stream": True})

    assert reply.status_code == 200
    assert '"error"' in reply.text.rsplit("data: ", 1)[1]
    assert len(decode.bodies) == 1


async def test_a_client_that_leaves_ends_both_halves(pairs):
    prefill, decode = Upstream(hold=True), Upstream(hold=True)
    async with pairs([prefill], [decode]) as front:
        with pytest.raises(httpx.ReadTimeout):
            await front.post("/generate", {"text": "x"}, timeout=0.5)
        await until(lambda: prefill.left == decode.left == 1)
        await until(lambda: all(w.load == 0 for w in front.runtime.registry.workers))


async def test_an_abort_reaches_both_halves(pairs):
    prefill, decode = Upstream(hold=True), Upstream(hold=True)
    async with pairs([prefill], [decode]) as front:
        running = asyncio.create_task(front.post("/generate", {"text": "x", "rid": "r1"}))
        await until(lambda: len(prefill.bodies) == len(decode.bodies) == 1)
        prefill.hold = decode.hold = False
        await front.post("/abort_request", {"rid": "r1"})
        assert prefill.paths[1:] == decode.paths[1:] == ["/abort_request"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_without_one_of_the_two_nothing_is_served(pairs):
    alone = Upstream()
    async with pairs([], [], [alone], wait=0) as front:
        body = {"url": alone.url, "worker_type": "prefill"}
        assert (await front.post("/workers", body)).status_code == 202
        await front.settled(1)
        reply = await front.post("/generate", {"text": "x"})
        ready = await front.get("/readiness")

    assert reply.status_code == 503
    assert "There is no decode worker" in reply.json()["error"]["message"]
    assert ready.status_code == 503


async def test_what_takes_one_worker_goes_to_a_prefill_worker(pairs):
    prefill, decode = Upstream(), Upstream()
    async with pairs([prefill], [decode]) as front:
        assert (await front.post("/v1/embeddings", {"input": "x"})).status_code == 200

    assert prefill.bodies == [{"input": "x"}]
    assert decode.bodies == []


async def test_where_there_are_regular_workers_they_serve(pairs):
    regular = Upstream(answer=(200, {"by": "r"}))
    async with pairs([Upstream()], [Upstream()], [regular]) as front:
        await front.post("/workers", {"url": regular.url})
        await front.settled(3)
        reply = await front.post("/generate", {"text": "x"})

    assert reply.json() == {"by": "r"}
    assert regular.bodies == [{"text": "x"}]


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
async def test_what_only_one_worker_keeps_is_served_by_it(pairs, name):
    prefill, decode = Upstream(), Upstream()
    async with pairs([prefill], [decode]) as front:
        reply = await front.post("/v1/responses", {"model": "m", "input": "x", name: "x_1"})

    assert reply.status_code == 200
    bodies = prefill.bodies + decode.bodies
    assert bodies == [{"model": "m", "input": "x", name: "x_1"}]


async def test_turns_of_a_session_go_to_the_worker_that_keeps_it(pairs):
    prefill, decode = Upstream(), Upstream()
    async with pairs([prefill], [decode]) as front:
        await front.post("/open_session", {"capacity_of_str_len": 100})
        for _ in range(2):
            turn = {"text": "x", "session_params": {"id": "s"}}
            assert (await front.post("/generate", turn)).status_code == 200

    keeper, other = (prefill, decode) if prefill.bodies else (decode, prefill)
    assert keeper.paths == ["/open_session", "/generate", "/generate"]
    assert other.bodies == []
    assert "bootstrap_room" not in keeper.bodies[-1]


async def test_the_room_of_a_data_parallel_rank_leads_to_it(pairs):
    prefill, decode = Upstream(dp_size=3), Upstream()
    changes = {"workers__dp_aware": True, "routing__prefill_policy": "round_robin"}
    async with pairs([prefill], [decode], wait=4, **changes) as front:
        for _ in range(3):
            await front.post("/generate", {"text": ["x", "y"]})

    ranks = [body["data_parallel_rank"] for body in prefill.bodies]
    assert sorted(ranks) == [0, 1, 2]
    for body, rank in zip(prefill.bodies, ranks, strict=True):
        assert [room % 3 for room in body["bootstrap_room"]] == [rank, rank]


async def test_a_worker_can_be_asked_for_by_name(pairs):
    decodes = [Upstream(), Upstream()]
    async with pairs([Upstream()], decodes) as front:
        for _ in range(3):
            headers = {"x-smg-target-worker": decodes[1].url}
            await front.post("/generate", {"text": "x"}, headers=headers)

    assert [len(worker.bodies) for worker in decodes] == [0, 3]
