"""Laws of the APIs: streamed events add up to the whole answer, on every route.

For any text and any cut of it, and for every format of tool calls and of thinking.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sylvan.text import reasoning
from tests.support.http import Client, checkpoint, client, engine, parse_events
from tests.unit.runtime.server.test_chat import ANY_TEXT, chat, joined, says, stream
from tests.unit.text.test_reasoning import ODD
from tests.unit.text.test_tools import ARGS, SAMPLES
from tests.unit.text.test_tools import TOOLS as SPECS

__all__ = ["checkpoint", "client", "engine"]

CHAT = [{"role": "user", "content": "Hello"}]
NAME = "get_weather"
SCHEMA = {"type": "object", "properties": {"a": {"type": "object"}}}
FUNCTION = {"name": NAME, "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = [
    {"type": "function", "function": {"name": s.name, "parameters": s.parameters}} for s in SPECS
]
Found = list[Any]


class Native:
    """`/generate`: the newest text is the whole one."""

    path = "/generate"
    body: ClassVar[dict[str, Any]] = {
        "text": "Hello",
        "sampling_params": {"max_new_tokens": None},
        "return_logprob": True,
    }

    def whole(self, reply: Any) -> Found:
        meta = reply["meta_info"]
        counts = [meta[n] for n in ("prompt_tokens", "completion_tokens", "cached_tokens")]
        return [reply["text"], reply["output_ids"], meta["output_token_logprobs"], counts]

    def joined(self, text: str) -> Found:
        return self.whole(parse_events(text)[-2])


class Completions:
    """Deltas of text and log probabilities."""

    path = "/v1/completions"
    body: ClassVar[dict[str, Any]] = {"prompt": "Hello", "max_tokens": 500, "logprobs": 1}

    def whole(self, reply: Any) -> Found:
        [choice] = reply["choices"]
        probs = {key: values for key, values in choice["logprobs"].items() if values}
        return [choice["text"], choice["finish_reason"], probs, reply["usage"]]

    def joined(self, text: str) -> Found:
        *events, last = parse_events(text)[:-1]
        choices = [event["choices"][0] for event in events]
        probs: dict[str, list[Any]] = {}
        for choice in choices:
            for key, values in (choice["logprobs"] or {}).items():
                probs.setdefault(key, []).extend(values)
        whole = "".join(choice["text"] for choice in choices)
        return [whole, choices[-1]["finish_reason"], probs, last["usage"]]


class Responses:
    """Items whose deltas and last states agree."""

    path = "/v1/responses"
    body: ClassVar[dict[str, Any]] = {
        "input": "Hello",
        "tools": [{"type": "function", **FUNCTION}],
        "store": False,
    }

    def whole(self, reply: Any) -> Found:
        return [[_shown(item) for item in reply["output"]], reply["status"], reply["usage"]]

    def joined(self, text: str) -> Found:
        events = [json.loads(b.split("data: ", 1)[1]) for b in text.strip().split("\n\n")]
        final = events[-1]["response"]
        for kind, item in (
            ("output_text", "message"),
            ("function_call_arguments", "function_call"),
        ):
            deltas = "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
            items = [i for i in final["output"] if i["type"] == item]
            assert deltas == "".join(_words(items)), events
        return self.whole(final)


class Messages:
    """Blocks put together from their deltas."""

    path = "/v1/messages"
    body: ClassVar[dict[str, Any]] = {
        "model": "m",
        "messages": CHAT,
        "max_tokens": 500,
        "tools": [{"name": NAME, "input_schema": SCHEMA}],
    }

    def whole(self, reply: Any) -> Found:
        blocks = [
            [b["type"], b.get("text") or b.get("thinking") or b.get("input") or ""]
            for b in reply["content"]
        ]
        return [blocks, reply["stop_reason"], reply["usage"]["output_tokens"]]

    def joined(self, text: str) -> Found:
        events = [json.loads(b.split("data: ", 1)[1]) for b in text.strip().split("\n\n")]
        blocks: list[list[Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append([event["content_block"]["type"], ""])
            elif event["type"] == "content_block_delta":
                found = event["delta"]
                texts = (found.get(k) for k in ("text", "thinking", "partial_json"))
                blocks[-1][1] += next((t for t in texts if t), "")
        for block in blocks:
            if block[0] == "tool_use":
                block[1] = _object(block[1]) or ""
        ending = events[-2]
        return [blocks, ending["delta"]["stop_reason"], ending["usage"]["output_tokens"]]


class Ollama:
    """Lines whose contents are joined."""

    path = "/api/chat"
    body: ClassVar[dict[str, Any]] = {"model": "m", "messages": CHAT, "tools": [TOOL]}

    def whole(self, reply: Any) -> Found:
        return self.joined(json.dumps(reply))

    def joined(self, text: str) -> Found:
        lines = [json.loads(line) for line in text.splitlines()]
        messages = [line["message"] for line in lines]
        last = lines[-1]
        return [
            "".join(m["content"] for m in messages),
            "".join(m.get("thinking", "") for m in messages),
            [call for m in messages for call in m.get("tool_calls", ())],
            [last[key] for key in ("done_reason", "prompt_eval_count", "eval_count")],
        ]


def _words(items: Iterable[Any]) -> Iterable[str]:
    for item in items:
        if item["type"] == "function_call":
            yield item["arguments"]
        for part in item.get("content") or ():
            yield part["text"]


def _shown(item: Any) -> Any:
    return {k: v for k, v in item.items() if k not in ("id", "call_id")}


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"partial_json": text}


@pytest.mark.parametrize("api", [Native(), Completions(), Responses(), Messages(), Ollama()])
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=ANY_TEXT, size=st.integers(1, 40))
async def test_streams_add_up_to_the_whole_answer(client, api, text, size):
    says(client, text)
    client.engine.control.per_message = size
    wanted = {"stream_options": {"include_usage": True}} if "/completions" in api.path else {}

    reply = await client.post(api.path, {**api.body, "stream": False})
    events = await client.post(api.path, {**api.body, "stream": True, **wanted})

    assert (reply.status_code, events.status_code) == (200, 200)
    assert api.joined(events.text) == api.whole(reply.json())


@pytest.mark.parametrize("name", sorted(SAMPLES))
async def test_calls_of_every_format_are_streamed_whole(engine, name):
    client = Client(engine, tool_parser=name, reasoning_parser="qwen3")
    says(client, "<think>Hm.</think>\n\nLet me see.\n\n" + SAMPLES[name])
    reply = await chat(client, tools=TOOLS)
    message = reply["choices"][0]["message"]
    whole = [[c["function"]["name"], c["function"]["arguments"]] for c in message["tool_calls"]]

    assert [(n, json.loads(a)) for n, a in whole] == [("get_weather", ARGS), ("now", {})]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me see.")
    for size in (1, 5, 64):
        engine.control.per_message = size
        events = await stream(client, tools=TOOLS, stream_options={"include_usage": True})
        found = joined(events)
        assert [[n, a or "{}"] for n, a in found["calls"]] == whole
        assert (found["reasoning"], found["content"]) == ("Hm.", "Let me see.")
        assert found["finish"] == reply["choices"][0]["finish_reason"] == "tool_calls"
        assert events[-1]["usage"] == reply["usage"]


@pytest.mark.parametrize("name", sorted(set(reasoning.options()) - {"auto"}))
async def test_thinking_of_every_format_is_streamed_whole(engine, name):
    client = Client(engine, reasoning_parser=name, tool_parser=None)
    found = reasoning.family(name, chat_template="<think>")
    says(client, f"{found.starts[0]}\nwhy \u4f60\n{found.ends[0]}\n\nanswer\n")
    reply = await chat(client)
    message = reply["choices"][0]["message"]
    whole = (message["reasoning_content"] or "", message["content"])

    if name not in ODD:
        assert whole == ("why \u4f60", "answer\n")
    for size in (1, 5, 64):
        engine.control.per_message = size
        events = await stream(client, stream_options={"include_usage": True})
        got = joined(events)
        assert (got["reasoning"], got["content"]) == whole
        assert events[-1]["usage"] == reply["usage"]
