"""The `anthropic` package."""

from __future__ import annotations

import sys

import anthropic
from steps import HELLO, KEY, MODEL, WEATHER, check, raises, run, step

URL = sys.argv[1]
TOOL = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}
STOPS = ("end_turn", "max_tokens", "tool_use", "stop_sequence")
GREEDY = {"temperature": 0}  # which newer versions of the package do not offer
# one that the server itself ends, and answers with 503
LATE = {"max_tokens": 400, "extra_body": {"timeout": 0.001}}
client = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0, timeout=120)


def ask(**fields):
    return client.messages.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 16, **fields})


@step
def chat():
    reply = ask(system="Be brief.")
    assert reply.role == "assistant"
    assert reply.stop_reason in STOPS
    assert reply.content[-1].type == "text"
    assert reply.usage.output_tokens <= 16
    assert ask(max_tokens=1).stop_reason == "max_tokens"


@step
def key_as_header():
    with anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0) as other:
        assert other.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 0


@step
def streamed_chat():
    kinds = []
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "extra_body": GREEDY}
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(b.text for b in final.content if b.type == "text")
    assert [b.type for b in final.content] == [b.type for b in ask(extra_body=GREEDY).content]
    for event in client.messages.create(**fields, stream=True):
        kinds.append(event.type)
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") >= 1


@step
def tools_with_results():
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        choice["disable_parallel_tool_use"] = True
        reply = ask(tools=[TOOL], tool_choice=choice, max_tokens=1200)
        assert reply.stop_reason == "tool_use"
        [call] = [b for b in reply.content if b.type == "tool_use"]
        check(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    history = [
        *HELLO,
        {"role": "assistant", "content": [b.model_dump() for b in reply.content]},
        {"role": "user", "content": [result]},
    ]
    after = ask(messages=history, tools=[TOOL])
    assert prompt_tokens(after) > prompt_tokens(reply)


@step
def streamed_tools():
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 1200, "tools": [TOOL]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**fields, tool_choice=choice) as stream:
        final = stream.get_final_message()
    [call] = [b for b in final.content if b.type == "tool_use"]
    check(call.input)
    assert final.stop_reason == "tool_use"


@step
def results_of_parallel_tools():
    calls = [
        {"type": "tool_use", "id": f"toolu_{i}", "name": "get_weather", "input": {"city": city}}
        for i, city in enumerate(("Paris", "Rome"))
    ]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": c["id"],
            "content": [{"type": "text", "text": "sun"}],
        }
        for c in calls
    ]
    history = [
        *HELLO,
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    assert ask(messages=history, tools=[TOOL]).stop_reason in STOPS


@step
def thinking():
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert ask(thinking=budget, max_tokens=1100).stop_reason in STOPS
    expect(anthropic.BadRequestError, thinking={"type": "enabled", "budget_tokens": 1})


@step
def counted_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=[TOOL]).input_tokens
    assert counted == prompt_tokens(ask(tools=[TOOL]))


@step
def structured():
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    output = {"format": {"type": "json_schema", "schema": schema}}
    reply = ask(max_tokens=1200, extra_body={"output_config": output})
    assert '"sunny"' in reply.content[-1].text


@step
def errors():
    expect(anthropic.BadRequestError, messages=[])
    expect(anthropic.BadRequestError, max_tokens=-1)
    wrong = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    with raises(anthropic.AuthenticationError) as caught:
        wrong.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert caught.error.body["error"]["type"] == "authentication_error"


@step
def timeouts():
    with raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.001).messages.create(
            model=MODEL, messages=HELLO, max_tokens=400
        )


@step
def retries():
    patient, tries = client.with_options(max_retries=1), []
    patient._client.event_hooks = {"request": [lambda request: tries.append(request.url)]}
    with raises(anthropic.APIStatusError) as caught:
        patient.messages.create(model=MODEL, messages=HELLO, **LATE)
    patient._client.event_hooks = {}
    assert caught.error.status_code == 503
    assert caught.error.body["error"]["type"] == "overloaded_error"
    assert len(tries) == 2


def expect(kind, **fields):
    with raises(kind) as caught:
        ask(**fields)
    assert caught.error.body["type"] == "error"


def prompt_tokens(reply):
    usage = reply.usage
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


if __name__ == "__main__":
    run("anthropic")
