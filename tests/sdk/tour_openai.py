"""The `openai` package, 2.x and 3.x."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Literal

import openai
from pydantic import BaseModel
from steps import (
    EMBEDDER,
    HELLO,
    KEY,
    MODEL,
    TOOL,
    TWO_CALLS,
    WEATHER,
    check,
    check_vectors,
    near,
    raises,
    run,
    step,
)

URL, VECTORS = sys.argv[1:3]
BATCH_S = 120
ENDLESS = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
# one that the server itself ends, and answers with 503
LATE = {"max_tokens": 400, "extra_body": {"ignore_eos": True, "timeout": 0.001}}
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)
chat = client.chat.completions


class Plan(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool
    days: Literal[1, 2, 3]


class GetWeather(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


def ask(**fields):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "temperature": 0, **fields}
    return chat.create(**body)


@step
def models():
    listed = client.models.list().data
    assert [m.id for m in listed] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@step
def plain_chat():
    reply = ask()
    [choice] = reply.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert ask(max_tokens=1).choices[0].finish_reason == "length"
    assert ask(extra_body={"regex": "(yes|no)"}).choices[0].message.content in ("yes", "no")


@step
def streamed_chat():
    whole = ask(seed=1, n=2, temperature=0.7)
    texts = {0: "", 1: ""}
    chunks = list(
        ask(seed=1, n=2, temperature=0.7, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with ask(stream=True, max_tokens=400, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))  # and leave


@step
def choices_with_logprobs():
    reply = ask(n=2, logprobs=True, top_logprobs=2, max_tokens=4)
    assert [c.index for c in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


@step
def tools_with_results():
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        reply = ask(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=1200)
        assert reply.choices[0].finish_reason == "tool_calls"
        message = reply.choices[0].message
        [call] = message.tool_calls
        assert call.function.name == "get_weather"
        check(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*HELLO, message.model_dump(exclude_none=True), result]
    after = ask(messages=history, tools=[TOOL])
    assert after.usage.prompt_tokens > reply.usage.prompt_tokens
    silent = ask(messages=history, tools=[TOOL], tool_choice="none", max_tokens=1200)
    assert silent.choices[0].message.tool_calls is None


@step
def streamed_tools():
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 1200}
    parts = {}
    for chunk in ask(stream=True, parallel_tool_calls=False, **fields):
        for choice in chunk.choices:
            end = choice.finish_reason or ""
            for call in choice.delta.tool_calls or ():
                known = parts.setdefault(call.index, {"id": call.id, "text": ""})
                known["text"] += call.function.arguments or ""
    assert end == "tool_calls"
    assert list(parts) == [0]
    assert parts[0]["id"]
    check(json.loads(parts[0]["text"]))


@step
def parallel_tools():
    fields = {"tools": [TOOL], "extra_body": {"regex": TWO_CALLS}, "max_tokens": 200}
    reply = ask(**fields)
    calls = reply.choices[0].message.tool_calls
    assert len({call.id for call in calls}) == 2
    for call in calls:
        check(json.loads(call.function.arguments))
    with chat.stream(model=MODEL, messages=HELLO, temperature=0, **fields) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert [c.function.arguments for c in streamed] == [c.function.arguments for c in calls]
    results = [{"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in calls]
    message = reply.choices[0].message.model_dump(exclude_none=True)
    assert ask(messages=[*HELLO, message, *results], tools=[TOOL]).choices


@step
def structured_parse():
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 1200, "temperature": 0}
    parsed = chat.parse(**fields, response_format=Plan).choices[0].message.parsed
    assert isinstance(parsed, Plan)
    with chat.stream(**fields, response_format=Plan) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    tool = openai.pydantic_function_tool(GetWeather)
    reply = chat.parse(**fields, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert isinstance(reply.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)
    text = ask(response_format={"type": "json_object"}).choices[0].message.content
    assert text.lstrip()[:1] in ("{", "")


@step
def embeddings():
    made = openai.OpenAI(base_url=f"{VECTORS}/v1", api_key=KEY, max_retries=0).embeddings
    reply = made.create(model=EMBEDDER, input=["one", "two"])  # base64 on the wire
    assert [item.index for item in reply.data] == [0, 1]
    check_vectors([item.embedding for item in reply.data], 2)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens > 0
    plain = made.create(model=EMBEDDER, input="two", encoding_format="float").data[0].embedding
    near(plain, reply.data[1].embedding)
    short = made.create(model=EMBEDDER, input="two", dimensions=8).data[0].embedding
    length = sum(x * x for x in plain[:8]) ** 0.5
    near(short, [x / length for x in plain[:8]])
    for fields in ({"input": ""}, {"input": "one", "dimensions": 10**6}):
        with raises(openai.BadRequestError):
            made.create(model=EMBEDDER, **fields)
    with raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="one")
    assert "makes no embeddings" in caught.error.message


@step
def completions():
    reply = client.completions.create(
        model=MODEL, prompt=["one", "two"], max_tokens=3, echo=True, logprobs=1
    )
    assert [c.index for c in reply.choices] == [0, 1]
    assert reply.choices[1].text.startswith("two")
    assert reply.choices[0].logprobs.token_logprobs[0] is None


@step
def responses():
    fields = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input="Hello", **fields)
    assert first.status in ("completed", "incomplete")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    more = client.responses.create(input="More", previous_response_id=first.id, **fields)
    assert more.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(input="Hello", **fields) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == first.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    client.responses.delete(first.id)
    with raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


@step
def responses_with_tools():
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    fields = {"model": MODEL, "temperature": 0, "tools": [tool], "max_output_tokens": 1200}
    reply = client.responses.create(
        input="Hello", tool_choice="required", parallel_tool_calls=False, **fields
    )
    [call] = [item for item in reply.output if item.type == "function_call"]
    check(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = client.responses.create(input=[result], previous_response_id=reply.id, **fields)
    assert after.usage.input_tokens > reply.usage.input_tokens
    parsed = client.responses.parse(
        model=MODEL, input="Hello", text_format=Plan, max_output_tokens=1200
    )
    assert isinstance(parsed.output_parsed, Plan)


@step
def batches():
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 3}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    bodies = [body, {**body, "temperature": -1}]
    lines = [{**line, "custom_id": f"r{i}", "body": b} for i, b in enumerate(bodies)]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert client.files.content(file.id).read() == data
    assert file.id in [f.id for f in client.files.list()]
    fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = client.batches.create(input_file_id=file.id, **fields)
    deadline = time.monotonic() + BATCH_S
    while made.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline, made.status
        time.sleep(0.05)
        made = client.batches.retrieve(made.id)
    assert made.status == "completed", made
    assert (made.request_counts.completed, made.request_counts.failed) == (1, 1)
    good = json.loads(client.files.content(made.output_file_id).text)
    assert good["custom_id"] == "r0"
    assert good["response"]["body"]["usage"]["completion_tokens"] <= 3
    bad = json.loads(client.files.content(made.error_file_id).text)
    assert bad["response"]["status_code"] == 400
    assert client.files.delete(file.id).deleted
    assert made.id in [b.id for b in client.batches.list(limit=5)]


@step
def errors():
    for call, kind in (
        (lambda: ask(temperature=-1), openai.BadRequestError),
        (lambda: ask(messages=[{"role": "nobody", "content": ""}]), openai.BadRequestError),
        (lambda: client.models.retrieve("nothing"), openai.NotFoundError),
        (lambda: client.batches.retrieve("nothing"), openai.NotFoundError),
        (client.with_options(api_key="wrong").models.list, openai.AuthenticationError),
    ):
        with raises(kind) as caught:
            call()
        assert caught.error.message


@step
def timeouts():
    with raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).chat.completions.create(
            model=MODEL, messages=HELLO, **ENDLESS
        )
    with raises(openai.InternalServerError) as caught:
        ask(**LATE)
    assert caught.error.status_code == 503
    assert int(caught.error.response.headers["retry-after"]) >= 1


@step
def retries():
    patient, tries = client.with_options(max_retries=1), []
    patient._client.event_hooks = {"request": [lambda request: tries.append(request.url)]}
    with raises(openai.InternalServerError) as caught:
        patient.chat.completions.create(model=MODEL, messages=HELLO, **LATE)
    patient._client.event_hooks = {}
    assert caught.error.status_code == 503
    assert len(tries) == 2


@step
def many_at_once():
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as made:
            calls = [
                made.chat.completions.create(
                    model=MODEL, messages=HELLO, max_tokens=8, temperature=0
                )
                for _ in range(8)
            ]
            return await asyncio.gather(*calls)

    replies = asyncio.run(all_of_them())
    assert len({r.choices[0].message.content for r in replies}) == 1


if __name__ == "__main__":
    run("openai")
