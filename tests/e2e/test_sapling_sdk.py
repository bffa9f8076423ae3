"""The `openai` package against the built-in model: answers that make sense."""

from __future__ import annotations

import json

import openai
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client(sapling):
    with openai.OpenAI(base_url=f"{sapling.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def ask(client, text, **fields):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    reply = client.chat.completions.create(
        model="sapling", messages=messages, temperature=0, max_tokens=200, **fields
    )
    return reply.choices[0]


def test_it_says_who_it_is(client):
    choice = ask(client, "Who are you?")
    assert "sapling" in choice.message.content.lower()
    assert choice.finish_reason == "stop"


def test_stream_says_the_same(client):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chunks = client.chat.completions.create(
        model="sapling", messages=messages, temperature=0, max_tokens=100, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ask(client, messages).message.content
    assert "Paris" in text


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_it_calls_a_tool(client, choice):
    answer = ask(client, "What is the weather in Paris?", tools=[TOOL], tool_choice=choice)
    assert answer.finish_reason == "tool_calls"
    [call] = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_it_thinks_when_asked(client):
    answer = ask(
        client, "What is 17 + 25?", extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    assert answer.message.reasoning_content
    assert "42" in answer.message.content
    assert "think>" not in answer.message.content


@pytest.mark.parametrize("thinks", [False, True])
def test_its_logprobs_are_of_the_text(client, thinks):
    answer = ask(
        client,
        "What is 17 + 25?",
        logprobs=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinks}},
    )
    tokens = "".join(token.token for token in answer.logprobs.content)
    assert tokens == (answer.message.reasoning_content or "") + answer.message.content
