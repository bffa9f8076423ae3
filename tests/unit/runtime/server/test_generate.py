"""`/generate` over a scripted engine."""

from __future__ import annotations

import itertools

import pytest


async def test_single_prompt_gives_an_object(client):
    reply = (await client.post("/generate", {"text": "hello"})).json()

    assert reply["text"] == "hello"
    meta = reply["meta_info"]
    assert meta["prompt_tokens"] == 5
    assert meta["completion_tokens"] == 6
    assert meta["finish_reason"] == {"type": "stop", "matched": 258}
    assert meta["cached_tokens"] == 2
    assert {"id", "reasoning_tokens", "weight_version", "num_retractions", "e2e_latency"} <= set(
        meta
    )


async def test_batch_gives_a_list_prompt_by_prompt(client):
    body = {"text": ["ab", "cd"], "sampling_params": {"n": 2}, "rid": "r"}
    replies = (await client.post("/generate", body)).json()

    assert [r["text"] for r in replies] == ["ab", "ab", "cd", "cd"]
    assert [r["meta_info"]["id"] for r in replies] == ["r_0", "r_0", "r_1", "r_1"]


async def test_batch_of_one_gives_a_list(client):
    assert len((await client.post("/generate", {"text": ["ab"]})).json()) == 1


async def test_stream_is_cumulative(client):
    events = await client.events("/generate", {"text": "abc", "stream": True})

    assert events[-1] == "[DONE]"
    texts = [e["text"] for e in events[:-1]]
    assert texts[-1] == "abc"
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert events[0]["meta_info"]["finish_reason"] is None
    assert events[-2]["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(events[-2]["output_ids"]) == events[-2]["meta_info"]["completion_tokens"]
    assert "index" not in events[0]


async def test_incremental_stream_concatenates(engine):
    from tests.support.http import Client

    client = Client(engine, incremental_stream=True)
    body = {"text": "h\u00e9llo", "stream": True, "return_logprob": True}
    events = (await client.events("/generate", body))[:-1]

    assert "".join(e["text"] for e in events) == "h\u00e9llo"
    ids = [i for e in events for i in e["output_ids"]]
    logprobs = [lp for e in events for lp in e["meta_info"]["output_token_logprobs"]]
    assert [lp[1] for lp in logprobs] == ids


async def test_batch_stream_names_each_item(client):
    body = {"text": ["ab", "cd"], "sampling_params": {"n": 2}, "stream": True}
    events = (await client.events("/generate", body))[:-1]

    last = {e["index"]: e["text"] for e in events}
    assert last == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}


async def test_logprob_keys_have_the_shapes_of_the_contract(client):
    body = {
        "text": "abc",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [5, 7],
        "return_text_in_logprobs": True,
    }
    meta = (await client.post("/generate", body)).json()["meta_info"]

    assert [entry[2] for entry in meta["input_token_logprobs"]] == ["a", "b", "c"]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"][1]) == 2
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"]
    assert [e[:2] for e in meta["output_token_ids_logprobs"][0]] == [[-3.0, 5], [-3.0, 7]]


async def test_input_logprobs_are_empty_without_a_start(client):
    body = {"text": "abc", "return_logprob": True}
    meta = (await client.post("/generate", body)).json()["meta_info"]

    assert meta["input_token_logprobs"] == []
    assert "input_top_logprobs" not in meta


async def test_unknown_top_level_field_is_named_in_a_header(client):
    response = await client.post("/generate", {"text": "a", "foo": 1, "b\u00e4r": 2, "no_logs": 1})

    assert response.status_code == 200
    assert response.headers["x-sylvan-ignored-fields"] == "foo, b?r, no_logs"
    assert response.headers["x-sylvan-ignored-count"] == "3"


async def test_errors_of_a_full_server_have_the_flat_shape_too(client, engine):
    engine.manager.router.clients[0].give_up()
    full = await client.post("/generate", {"text": "a"})
    wrong = await client.post("/generate", {"text": ""})

    assert full.status_code == 503
    body = full.json()
    assert (body["object"], body["type"], body["code"]) == ("error", "503", 503)
    assert body["message"] == body["error"]["message"]
    assert (wrong.status_code, wrong.json().keys()) == (400, {"error"})


async def test_unknown_sampling_field_is_refused_with_the_nearest_name(client):
    response = await client.post("/generate", {"text": "a", "sampling_params": {"temprature": 1}})

    assert response.status_code == 400
    error = response.json()["error"]
    assert "did you mean 'temperature'?" in error["message"]
    assert error["param"] == "sampling_params.temprature"


@pytest.mark.parametrize(
    ("field", "value"),
    [("image_data", "x.png"), ("custom_logit_processor", "code"), ("input_embeds", [[0.5]])],
)
async def test_known_field_that_cannot_be_honoured_is_refused(client, field, value):
    response = await client.post("/generate", {"text": "a", field: value})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_known_field_that_asks_for_nothing_is_accepted(client):
    body = {"text": "a", "image_data": None, "return_hidden_states": False}
    response = await client.post("/generate", body)

    assert response.status_code == 200
    assert "x-sylvan-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"text": 5}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, -1]}, "input_ids[1]"),
        ({"input_ids": [10**9]}, "input_ids"),
        ({"text": "a", "sampling_params": {"n": 5_000_000}}, "sampling_params.n"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
        ({"text": ["a"] * 4097}, "text"),
        ({"text": ["a"] * 100, "sampling_params": {"n": 100}}, "sampling_params.n"),
        ({"text": "a" * 3000}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "max_new_tokens"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ],
)
async def test_bad_input_is_refused_naming_the_field(client, body, param):
    response = await client.post("/generate", body)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert param.split("[")[0].split(".")[-1] in error["message"] or "prompt" in error["message"]
    assert client.engine.manager.num_live == 0


async def test_null_max_new_tokens_means_the_rest_of_the_context(client):
    await client.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": None}})

    assert client.engine.control.requests[-1].sampling.max_new_tokens == 2048 - 3


async def test_abort_ends_a_stream_with_its_own_reason(client):
    import asyncio

    client.engine.control.hold = True
    call = asyncio.create_task(client.post("/generate", {"text": "abc", "rid": "mine"}))
    while not client.engine.control.requests:
        await asyncio.sleep(0)
    assert (await client.post("/abort_request", {"rid": "mine"})).status_code == 200
    reply = (await call).json()

    assert reply["meta_info"]["finish_reason"]["type"] == "abort"


async def test_ignored_fields_are_named_with_streams_too(client):
    response = await client.post("/generate", {"text": "a", "stream": True, "foo": 1})

    assert response.headers["x-sylvan-ignored-fields"] == "foo"
