"""`/v1/completions` and `/v1/models` over a scripted engine."""

from __future__ import annotations

import pytest


async def complete(client, **fields):
    response = await client.post("/v1/completions", {"prompt": "abc", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client, **fields):
    events = await client.events("/v1/completions", {"prompt": "abc", "stream": True, **fields})
    assert events[-1] == "[DONE]"
    return events[:-1]


async def test_answer_has_the_shape_of_the_contract(client):
    reply = await complete(client, model="m")

    assert reply["object"] == "text_completion"
    assert reply["choices"][0] == {
        "index": 0,
        "text": "abc",
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": 258,
    }
    assert reply["usage"]["prompt_tokens"] == 3


async def test_max_tokens_is_16_if_not_given(client):
    reply = await complete(client, prompt="x" * 40)

    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 16


async def test_prompts_and_samples_are_numbered_prompt_by_prompt(client):
    reply = await complete(client, prompt=["ab", "cd"], n=2)

    assert [c["text"] for c in reply["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == 12


async def test_prompts_may_be_token_ids(client):
    ids = client.engine.manager.tokenizer.encode("hey")
    reply = await complete(client, prompt=[ids, ids])

    assert [c["text"] for c in reply["choices"]] == ["hey", "hey"]


async def test_stream_adds_up_to_the_whole(client):
    events = await stream(client, n=2, stream_options={"include_usage": True})

    for index in range(2):
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in parts) == "abc"
        assert [c["finish_reason"] for c in parts][-1] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_comes_first_with_logprobs_of_the_prompt(client, streamed):
    fields = {"echo": True, "logprobs": 2, "max_tokens": 2}
    if streamed:
        choices = [c for e in await stream(client, **fields) for c in e["choices"]]
        text = "".join(c["text"] for c in choices)
        parts = [c["logprobs"] for c in choices if c["logprobs"]]
        logprobs = {key: [v for p in parts for v in p[key]] for key in parts[0]}
    else:
        choice = (await complete(client, **fields))["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]

    assert text == "abcab"
    assert logprobs["tokens"] == ["a", "b", "c", "a", "b"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_cover_the_tokens_of_the_text(client, streamed):
    if streamed:
        choices = [c for e in await stream(client, logprobs=1) for c in e["choices"]]
        tokens = [t for c in choices for t in (c["logprobs"] or {}).get("tokens", ())]
    else:
        [choice] = (await complete(client, logprobs=1))["choices"]
        tokens = choice["logprobs"]["tokens"]
        assert {len(values) for values in choice["logprobs"].values()} == {3}

    assert tokens == ["a", "b", "c"]  # without the end token


async def test_logprobs_beside_token_ids_cover_all_of_them(client):
    [choice] = (await complete(client, logprobs=1, return_token_ids=True))["choices"]

    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "<|im_end|>"]
    assert len(choice["token_ids"]) == 4


async def test_best_of_returns_n(client):
    reply = await complete(client, best_of=4, n=2)

    assert len(reply["choices"]) == 2
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["choices"][0]["logprobs"] is None


async def test_stop_string_is_named(client):
    reply = await complete(client, prompt="ab;cd", stop=";")

    assert reply["choices"][0]["text"] == "ab"
    assert reply["choices"][0]["matched_stop"] == ";"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": "a" * 3000}, "prompt"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"best_of": 5_000_000}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"prompt": ["a"] * 5000}, "prompt"),
    ],
)
async def test_bad_input_is_refused_naming_the_field(client, fields, param):
    response = await client.post("/v1/completions", {"prompt": "abc", **fields})

    assert response.status_code == 400
    assert response.json()["param"] == param


async def test_models_lists_the_served_name(client):
    cards = (await client.get("/v1/models")).json()["data"]

    assert [card["id"] for card in cards] == ["scripted"]
    assert cards[0]["max_model_len"] == 2048
    assert (await client.get("/v1/models/scripted")).json() == cards[0]


async def test_unknown_model_is_a_nested_404(client):
    response = await client.get("/v1/models/org/other")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
