"""Streams that another server continues, byte for byte, wherever they are cut."""

from __future__ import annotations

import json
import re

import pytest

from sylvan.config.values import Secret
from sylvan.protocol.journal import (
    JOURNAL_HEADER,
    KEY_HEADER,
    MEDIA_TYPE,
    PROBE,
    RESUME_HEADER,
    TICKET_HEADER,
    FrameKind,
    FrameReader,
    JournalError,
    JournalFrame,
    JournalTicket,
    ResumeFrom,
    read_head,
    read_totals,
)
from tests.support.http import Client
from tests.unit.runtime.server.test_chat import TOOL, TWO_CALLS

TICKET = JournalTicket(name="stream-1", seed=77, created=1_700_000_000.0)
HELLO = [{"role": "user", "content": "Hello"}]
BODIES = {
    "native": ("/generate", {"text": "caf\u00e9 na\u00efve", "stream": True}),
    "native n and logprobs": (
        "/generate",
        {
            "text": "abc",
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "sampling_params": {"n": 2},
        },
    ),
    "native batch": ("/generate", {"text": ["one", "three"], "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
    "chat with everything": (
        "/v1/chat/completions",
        {
            "messages": HELLO,
            "stream": True,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [TOOL],
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ),
    "chat with usage": (
        "/v1/chat/completions",
        {
            "messages": HELLO,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "completions": (
        "/v1/completions",
        {"model": "m", "prompt": ["ab", "cd"], "stream": True, "n": 2, "logprobs": 1},
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 400,
            "messages": HELLO,
            "stream": True,
            "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "m",
            "input": "Hello",
            "stream": True,
            "tools": [{"type": "function", "name": "get_weather", "parameters": {}}],
        },
    ),
}
STOPPED = ("/generate", {"text": "x", "stream": True, "sampling_params": {"stop": ["you"]}})


async def frames(client, path, body, ticket=TICKET, resume=None, **headers):
    """The frames of an answer."""
    data = client.http.build_request("POST", path, json=body).content
    headers = {TICKET_HEADER: ticket.to_header(), "content-type": "application/json", **headers}
    if resume is not None:
        blob = resume.encode()
        headers[RESUME_HEADER] = str(len(blob))
        data = blob + data
    response = await client.http.post(path, content=data, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    reader = FrameReader()
    found = list(reader.feed(response.content))
    assert reader.at_border
    return [frame for frame in found if frame.kind is not FrameKind.BEAT]


def text_of(found):
    """The client's answer, without times."""
    joined = b"".join(frame.body for frame in found if frame.kind is FrameKind.DATA)
    return re.sub(rb'("[a-z0-9_]+(?:_time|_ts|latency|throughput)"):[0-9.e-]+', rb"\1:0", joined)


GROWS = {"content", "reasoning_content", "arguments", "delta", "partial_json", "thinking"}
ONE_SAMPLE = {"native", "chat", "chat with usage", "messages", "responses"}


def said(path, text):
    """Contents of a stream, independent of its events and the order of samples."""
    grows = GROWS if path == "/generate" else GROWS | {"text"}
    found = {}
    for event in text.decode().removesuffix("\n\n").split("\n\n"):
        data = event.split("data: ", 1)[1]
        for place, value in leaves(data if data == "[DONE]" else json.loads(data)):
            if place[-1:] in (("sequence_number",), ("type",)) or value is None:
                continue
            if "logprobs" in place:
                found.setdefault(place, []).append(value)
            elif isinstance(value, str) and set(place) & grows:
                found[place] = found.get(place, "") + value
            else:
                found[place] = value
    return found


def leaves(value, place=()):
    """Every value that is no container, with where it is; samples are distinguished by index."""
    if isinstance(value, dict):
        mark = tuple(str(value[k]) for k in ("type", "index", "output_index") if k in value)
        for key, item in value.items():
            yield from leaves(item, (*place, *mark, key))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, (*place, "[]"))
    else:
        yield place, value


def position(data):
    """How far a client is that has seen these frames."""
    entries, since = [], 0
    for frame in data:
        if frame.entries:
            entries.append(frame.entries)
            since = 0
        since += 1
    return ResumeFrom(tuple(entries), since)


def speak(client):
    client.engine.control.script = lambda request, prompt: (
        "<think>\nHm." * ("think" in prompt) + "</think>" * ("think" in prompt) + TWO_CALLS
        if "tool" in prompt
        else f"I say \u00fc{prompt[-4:]} to you"
    )


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_continues_wherever_it_is_cut(client, name):
    path, body = BODIES[name]
    speak(client)
    whole = await frames(client, path, body)
    data = [frame for frame in whole if frame.kind is FrameKind.DATA]
    assert len(data) > 5

    for cut in range(0, len(data) + 1, max(1, len(data) // 8)):
        if "logprob" not in json.dumps(body):  # the script's depend on how tokens come
            client.engine.control.per_message = 1 + cut % 3
        rest = await frames(client, path, body, resume=position(data[:cut]))

        assert read_head(rest[0]).status == 200
        joined = text_of(data[:cut]) + text_of(rest)
        assert said(path, joined) == said(path, text_of(data)), cut
        if client.engine.control.per_message == 1 and name in ONE_SAMPLE:
            assert joined == text_of(data), cut
        assert read_totals(rest[-1]) == read_totals(whole[-1])


async def test_a_stop_that_is_half_said_is_still_found(client):
    path, body = STOPPED
    speak(client)
    whole = await frames(client, path, body)
    data = [frame for frame in whole if frame.kind is FrameKind.DATA]

    for cut in range(len(data) + 1):
        rest = await frames(client, path, body, resume=position(data[:cut]))
        assert text_of(data[:cut]) + text_of(rest) == text_of(data)


async def test_what_was_given_out_is_not_generated_again(client):
    path, body = BODIES["native"]
    speak(client)
    data = [f for f in await frames(client, path, body) if f.kind is FrameKind.DATA]
    client.engine.control.given = 0

    await frames(client, path, body, resume=position(data[:4]))

    [request] = client.engine.control.requests[1:]
    assert len(request.output_ids) == 4
    assert request.sampling.sampling_seed == TICKET.seed


async def test_the_ticket_pins_names_times_and_seeds(client):
    speak(client)
    path, body = BODIES["chat"]

    first, second = [await frames(client, path, body) for _ in range(2)]
    other = await frames(
        client, path, body, JournalTicket(name="b", seed=1, created=1_700_000_000.0)
    )

    assert text_of(first) == text_of(second)
    assert b'"created":1700000000' in text_of(first)
    assert text_of(other) != text_of(first)
    seeds = [request.sampling.sampling_seed for request in client.engine.control.requests]
    assert seeds == [77, 77, 1]


async def test_seeds_of_the_request_win(client):
    body = {"text": "x", "sampling_params": {"sampling_seed": 5}}

    await frames(client, "/generate", body)

    assert client.engine.control.requests[0].sampling.sampling_seed == 5


async def test_prompts_of_a_batch_have_seeds_of_their_own(client):
    await frames(client, "/generate", {"text": ["a", "b"]})

    seeds = {request.sampling.sampling_seed for request in client.engine.control.requests}
    assert len(seeds) == 2


async def test_a_whole_answer_comes_with_its_head_and_totals(client):
    speak(client)
    head, data, end = await frames(client, "/generate", {"text": "abc"})

    assert read_head(head).status == 200
    assert dict(read_head(head).headers)["content-type"] == "application/json"
    assert data.entries == b""
    assert read_totals(end).prompt_tokens == 3
    assert read_totals(end).completion_tokens > 3


async def test_errors_keep_their_status(client):
    head, data, _ = await frames(client, "/generate", {})

    assert read_head(head).status == 400
    assert b"text" in data.body


async def test_the_tenant_is_the_one_of_the_ticket(client):
    ticket = JournalTicket(name="t", seed=1, created=0.0, tenant="acme")

    await frames(client, "/generate", {"text": "x"}, ticket)

    assert client.engine.control.requests[0].tenant == "acme"


async def test_time_spent_elsewhere_counts_against_the_deadline(client):
    ticket = JournalTicket(name="t", seed=1, created=0.0, elapsed_s=20.0)

    await frames(client, "/generate", {"text": "x", "timeout": 30.0}, ticket)

    assert client.engine.control.requests[0].deadline_s == pytest.approx(10.0, abs=1.0)


@pytest.mark.parametrize("given", ["", "%%%", "e30=", "x" * 9000])
async def test_malformed_tickets_are_refused(client, given):
    response = await client.post("/generate", {"text": "x"}, headers={TICKET_HEADER: given})

    assert response.status_code == 400
    assert "ticket" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("-1", "number of bytes"),
        ("999999999", "at most"),
        ("5000", "cut short"),
        ("3", "malformed"),
    ],
)
async def test_malformed_journals_are_refused(client, size, message):
    headers = {TICKET_HEADER: TICKET.to_header(), RESUME_HEADER: size}
    response = await client.post("/generate", {"text": "x"}, headers=headers)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_a_journal_of_something_else_fails_that_request_only(client):
    speak(client)
    path, body = BODIES["native"]
    data = [f for f in await frames(client, path, body) if f.kind is FrameKind.DATA]
    short = {**body, "sampling_params": {"max_new_tokens": 2}}

    head, *_ = await frames(client, path, short, resume=position(data[:5]))

    assert read_head(head).status == 400
    assert text_of(await frames(client, path, body)) == text_of(data)


@pytest.mark.parametrize(
    ("settings", "headers", "trusted"),
    [
        ({}, {}, True),  # no keys at all, and from this machine
        ({"host": "0.0.0.0"}, {}, False),
        ({"gateway_key": Secret("g")}, {}, False),
        ({"gateway_key": Secret("g")}, {KEY_HEADER: "g"}, True),
        ({"gateway_key": Secret("g")}, {KEY_HEADER: "x"}, False),
        ({"api_key": Secret("k")}, {"authorization": "Bearer k"}, True),
        ({"api_key": Secret("k")}, {}, False),
        ({"admin_api_key": Secret("a")}, {}, False),
        ({"admin_api_key": Secret("a")}, {"authorization": "Bearer a"}, True),
    ],
)
async def test_tickets_are_taken_from_gateways_only(engine, settings, headers, trusted):
    client = Client(engine, **settings)

    probe = await client.get("/health", headers={TICKET_HEADER: PROBE, **headers})
    response = await client.post(
        "/generate", {"text": "x"}, headers={TICKET_HEADER: TICKET.to_header(), **headers}
    )

    assert probe.headers[JOURNAL_HEADER] == ("1" if trusted else "0")
    assert response.status_code == (200 if trusted else 403)
    await client.http.aclose()


async def test_ordinary_calls_are_left_alone(client):
    response = await client.post("/generate", {"text": "x"})

    assert JOURNAL_HEADER not in response.headers
    assert response.headers["content-type"] == "application/json"


def test_frames_survive_any_cut():
    sent = [
        JournalFrame(FrameKind.HEAD, b"head"),
        JournalFrame(FrameKind.DATA, b"x" * 1000, b"entries"),
        JournalFrame(FrameKind.BEAT),
        JournalFrame(FrameKind.END, b""),
    ]
    data = b"".join(frame.encode() for frame in sent)
    for step in (1, 7, 8, 9, 500, len(data)):
        reader = FrameReader()
        parts = [data[i : i + step] for i in range(0, len(data), step)]
        assert [frame for part in parts for frame in reader.feed(part)] == sent
        assert reader.at_border


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\r\n", b"\x02\xff\xff\xff\xff\x00\x00\x00\x00"])
def test_what_is_no_frame_is_noticed(data):
    with pytest.raises(JournalError):
        list(FrameReader().feed(data))
