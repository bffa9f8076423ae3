"""The `openai` package against a real server with random weights."""

from __future__ import annotations

import json

import openai
import pytest

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_model_can_be_retrieved(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nothing")
    assert caught.value.code == "model_not_found"


def test_seeded_chat_is_reproducible_and_streams_the_same_text(client, model):
    fields = {"model": model, "messages": HELLO, "max_tokens": 12, "seed": 7}
    one = client.chat.completions.create(**fields)
    two = client.chat.completions.create(**fields)
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.usage.total_tokens == one.usage.prompt_tokens + one.usage.completion_tokens

    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == one.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == one.usage.completion_tokens


def test_several_choices_have_logprobs(client, model):
    reply = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=4, n=3, logprobs=True, top_logprobs=2
    )
    assert [c.index for c in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 2
            assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_join_to_the_text_before_a_stop(client, model, stream):
    fields = {"model": model, "messages": HELLO, "max_tokens": 24, "seed": 3, "temperature": 0}
    text = client.chat.completions.create(**fields).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    made = client.chat.completions.create(**fields, stop=[stop], logprobs=True, stream=stream)
    choices = [c for chunk in made for c in chunk.choices] if stream else made.choices
    shown = [c.delta if stream else c.message for c in choices]
    data = [bytes(t.bytes) for c in choices if c.logprobs for t in c.logprobs.content]

    said = "".join((m.reasoning_content or "") + (m.content or "") for m in shown)
    assert said == text[: text.index(stop)]
    assert b"".join(data).decode(errors="replace") == said


def test_tools_and_their_results_can_be_sent(client, model):
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], max_tokens=4
    )
    assert reply.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_completion_echoes_its_prompt_with_logprobs(client, model):
    reply = client.completions.create(
        model=model, prompt="abc", max_tokens=2, echo=True, logprobs=1, temperature=0
    )
    choice = reply.choices[0]
    assert choice.text.startswith("abc")
    assert choice.logprobs.tokens[:3] == ["a", "b", "c"]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_response_can_be_stored_continued_and_streamed(client, model):
    first = client.responses.create(model=model, input="Hello", max_output_tokens=5)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=model, input="More", previous_response_id=first.id, max_output_tokens=5
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    kinds = [
        event.type
        for event in client.responses.create(
            model=model, input="Hello", max_output_tokens=5, stream=True
        )
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_batch_is_worked_off(client, model, tmp_path):
    path = tmp_path / "in.jsonl"
    body = {"model": model, "messages": HELLO, "max_tokens": 3}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(5)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    answers = client.files.content(batch.output_file_id).text.splitlines()
    assert {json.loads(line)["custom_id"] for line in answers} == {f"r{i}" for i in range(5)}


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 5_000_000}, openai.BadRequestError, "n"),
        ({"max_tokens": 10**9}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"logprobs": True, "top_logprobs": 10**6}, openai.BadRequestError, "top_logprobs"),
    ],
)
def test_errors_name_the_field(client, model, fields, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": model, "messages": HELLO, **fields})
    assert caught.value.param == param
    assert caught.value.status_code == 400


def test_wrong_key_is_refused(server):
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_timeout_of_the_client_ends_the_request(client, model):
    impatient = client.with_options(timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(
            model=model, messages=HELLO, max_tokens=1500, extra_body={"ignore_eos": True}
        )
    assert client.chat.completions.create(model=model, messages=HELLO, max_tokens=1).choices


async def test_async_client_streams(server, model):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        stream = await client.chat.completions.create(
            model=model, messages=HELLO, max_tokens=5, stream=True
        )
        finishes = [c.choices[0].finish_reason async for c in stream]
    assert finishes[-1] in ("length", "stop")
