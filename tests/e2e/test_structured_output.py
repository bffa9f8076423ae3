"""Grammars on every API of a real server with the built-in model."""

from __future__ import annotations

import importlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<w>", "schema": {"enum": [1, 2]}, "end": "</w>"}],
    "triggers": ["<w>"],
    "at_least_one": True,
    "stop_after_first": True,
}
NEW_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<w>",
        "content": {"type": "regex", "pattern": "[12]"},
        "end": "</w>",
    },
}
TOOL = {"name": "look", "description": "Looks a city up.", "parameters": SCHEMA, "strict": True}
MESSAGES = [{"role": "user", "content": "How is the weather?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
CHAT = {"model": "sapling", "messages": MESSAGES, "max_tokens": 300, "seed": 3, **NO_THINKING}


@pytest.fixture(scope="module")
def http(sapling):
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=sapling.url, headers=headers, timeout=240) as client:
        yield client


def post(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def is_valid(text):
    return importlib.import_module("jsonschema_rs").is_valid(SCHEMA, json.loads(text))


def native(http, **grammar):
    params = {"max_new_tokens": 200, "sampling_seed": 3, **grammar}
    return post(http, "/generate", {"text": "Weather:", "sampling_params": params})["text"]


def chat(http, **fields):
    choice = post(http, "/v1/chat/completions", CHAT | fields)["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    return choice["message"]


def completion(http, **fields):
    body = {"model": "sapling", "prompt": "Weather:", "max_tokens": 300, "seed": 3, **fields}
    return post(http, "/v1/completions", body)["choices"][0]["text"]


def response(http, **fields):
    body = {"model": "sapling", "input": "Weather?", "max_output_tokens": 300, **NO_THINKING}
    output = post(http, "/v1/responses", body | fields)["output"]
    return next(o for o in output if o["type"] == "message")["content"][0]["text"]


def message(http, **fields):
    body = {"model": "sapling", "messages": MESSAGES, "max_tokens": 300, **fields}
    reply = post(http, "/v1/messages", body)
    assert reply["stop_reason"] == "end_turn"
    return "".join(block["text"] for block in reply["content"] if block["type"] == "text")


def ollama(http, path, **fields):
    body = {"model": "sapling", "stream": False, "think": False, "options": {"num_predict": 300}}
    text = {"messages": MESSAGES} if path == "/api/chat" else {"prompt": "Weather:"}
    reply = post(http, path, body | text | fields)
    assert reply["done_reason"] == "stop"
    return reply["message"]["content"] if path == "/api/chat" else reply["response"]


def called(http):
    tools = [{"type": "function", "function": TOOL}]
    wanted = {"type": "function", "function": {"name": "look"}}
    return chat(http, tools=tools, tool_choice=wanted)["tool_calls"][0]["function"]["arguments"]


def of_schema(name="weather"):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMA, "strict": True}}


WAYS = {
    "native-json_schema": (lambda h: native(h, json_schema=json.dumps(SCHEMA)), is_valid),
    "native-regex": (lambda h: native(h, regex="(hot|cold) [0-9]{2}"), r"(hot|cold) [0-9]{2}"),
    "native-ebnf": (lambda h: native(h, ebnf='root ::= "a" ("b" | "c")'), "ab|ac"),
    "native-choice": (lambda h: native(h, choice=["rain", "sun"]), "rain|sun"),
    "native-old-tag": (lambda h: native(h, structural_tag=json.dumps(OLD_TAG)), "<w>[12]</w>"),
    "native-new-tag": (lambda h: native(h, structural_tag=json.dumps(NEW_TAG)), "<w>[12]</w>"),
    "chat-json_schema": (lambda h: chat(h, response_format=of_schema())["content"], is_valid),
    "chat-old-tag": (lambda h: chat(h, response_format=OLD_TAG)["content"], "<w>[12]</w>"),
    "chat-new-tag": (lambda h: chat(h, response_format=NEW_TAG)["content"], "<w>[12]</w>"),
    "chat-regex": (lambda h: chat(h, regex="[ab]{3}")["content"], "[ab]{3}"),
    "chat-tool": (called, is_valid),
    "completion-json_schema": (lambda h: completion(h, response_format=of_schema()), is_valid),
    "completion-choice": (lambda h: completion(h, choice=["rain", "sun"]), "rain|sun"),
    "responses": (
        lambda h: response(
            h, text={"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}
        ),
        is_valid,
    ),
    "anthropic": (
        lambda h: message(h, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
        is_valid,
    ),
    "ollama-chat": (lambda h: ollama(h, "/api/chat", format=SCHEMA), is_valid),
    "ollama-generate": (lambda h: ollama(h, "/api/generate", format=SCHEMA), is_valid),
    "free": (lambda h: native(h, max_new_tokens=8), r"(?s).*"),
}


def test_every_way_is_held_all_at_once(http):
    with ThreadPoolExecutor(len(WAYS)) as pool:
        texts = {name: pool.submit(ask, http) for name, (ask, _) in WAYS.items()}
        found = {name: text.result() for name, text in texts.items()}

    for name, (_, check) in WAYS.items():
        held = check(found[name]) if callable(check) else re.fullmatch(check, found[name])
        assert held, (name, found[name])


def test_json_object_is_any_object(http):
    body = CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 30}
    choice = post(http, "/v1/chat/completions", body)["choices"][0]

    assert choice["message"]["content"].lstrip().startswith("{")
    assert choice["finish_reason"] in ("stop", "length")


FORMAT = {"type": "json_schema", "name": "w", "schema": SCHEMA}


def thought_on_chat(http, on):
    fields = {"enable_thinking": on, "thinking_budget": 40, "temperature": 0}
    body = {**CHAT, "chat_template_kwargs": {}, "response_format": of_schema(), **fields}
    message = post(http, "/v1/chat/completions", body)["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"]


def thought_on_responses(http, on):
    fields = {"reasoning": {"effort": "high" if on else "none", "budget_tokens": 40}}
    body = {"model": "sapling", "input": "Weather?", "max_output_tokens": 300, "temperature": 0}
    items = post(http, "/v1/responses", body | fields | {"text": {"format": FORMAT}})["output"]
    parts = {item["type"]: item["content"][0]["text"] for item in items}
    return parts.get("reasoning", ""), parts["message"]


def thought_on_messages(http, on):
    thinking = {"type": "enabled", "budget_tokens": 1024} if on else {"type": "disabled"}
    body = {"model": "sapling", "messages": MESSAGES, "max_tokens": 1500, "temperature": 0}
    body |= {"thinking": thinking, "output_config": {"format": FORMAT}}
    blocks = post(http, "/v1/messages", body)["content"]
    parts = {block["type"]: block for block in blocks}
    return parts.get("thinking", {}).get("thinking", ""), parts["text"]["text"]


def thought_on_ollama(http, on):
    body = {"model": "sapling", "messages": MESSAGES, "stream": False, "format": SCHEMA}
    options = {"num_predict": 1500, "temperature": 0}
    message = post(http, "/api/chat", body | {"think": on, "options": options})["message"]
    return message.get("thinking", ""), message["content"]


THINKERS = [thought_on_chat, thought_on_responses, thought_on_messages, thought_on_ollama]


@pytest.mark.parametrize("ask", THINKERS)
def test_the_grammar_begins_after_the_thinking_that_the_model_opens(http, ask):
    thought, answer = ask(http, True)

    assert len(thought) > 10
    assert is_valid(answer)
    assert not thought.lstrip().startswith("{")


@pytest.mark.parametrize("ask", THINKERS)
def test_the_grammar_begins_with_the_output_where_thinking_is_off(http, ask):
    thought, answer = ask(http, False)

    assert not thought
    assert is_valid(answer)


def test_a_call_may_follow_thinking(http):
    fields = {"enable_thinking": True, "thinking_budget": 40, "temperature": 0}
    tools = [{"type": "function", "function": TOOL}]
    body = {**CHAT, "chat_template_kwargs": {}, "tools": tools, "tool_choice": "required"}
    message = post(http, "/v1/chat/completions", body | fields)["choices"][0]["message"]

    assert message["reasoning_content"]
    assert is_valid(message["tool_calls"][0]["function"]["arguments"])


def test_every_sample_thinks_for_itself(http):
    fields = {"enable_thinking": True, "thinking_budget": 24, "n": 4, "temperature": 1.0}
    body = {**CHAT, "chat_template_kwargs": {}, "response_format": of_schema(), **fields}
    messages = [c["message"] for c in post(http, "/v1/chat/completions", body)["choices"]]

    assert all(is_valid(message["content"]) for message in messages)
    assert len({message.get("reasoning_content") for message in messages}) > 1


def test_strict_tools_beside_a_format_are_called_or_it_is_followed(http):
    body = CHAT | {"tools": [{"type": "function", "function": TOOL}], "temperature": 0}
    ends = []
    for content in ("How is the weather?", "Call look for Rome.", "Answer: Oslo, warm."):
        fields = {"messages": [{"role": "user", "content": content}]}
        reply = post(http, "/v1/chat/completions", body | fields | {"response_format": of_schema()})
        message, end = reply["choices"][0]["message"], reply["choices"][0]["finish_reason"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        if end != "length":
            assert all(map(is_valid, calls or [message["content"]]))
        ends.append(end)

    assert set(ends) != {"length"}


BAD = [
    ("/generate", {"text": "x", "sampling_params": {"regex": "(a"}}, "regex"),
    ("/generate", {"text": "x", "sampling_params": {"ebnf": "nonsense"}}, "ebnf"),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema"}}, "json_schema"),
    ("/v1/chat/completions", CHAT | {"regex": "[b-a]"}, "regex"),
    (
        "/v1/messages",
        {
            "model": "sapling",
            "messages": MESSAGES,
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "nope"}}},
        },
        "nope",
    ),
    ("/api/chat", {"model": "sapling", "messages": MESSAGES, "format": {"type": "nope"}}, "nope"),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "w",
                    "schema": {"type": "array", "uniqueItems": True},
                    "strict": "grammar",
                },
            }
        },
        "uniqueItems",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "says"), BAD, ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_bad_grammar_is_a_bad_request(http, path, body, says):
    refused = http.post(path, json=body)

    assert refused.status_code == 400, refused.text
    assert says in refused.text
    assert native(http, choice=["rain", "sun"]) in ("rain", "sun")


DIFFERENT = {
    "type": "object",
    "properties": {
        "ids": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "uniqueItems": True,
            "minItems": 3,
            "maxItems": 4,
        }
    },
    "required": ["ids"],
    "additionalProperties": False,
}
PICK = {"name": "pick", "description": "Picks numbers.", "strict": True}
PICKING = {
    "/v1/chat/completions": {
        **CHAT,
        "tools": [{"type": "function", "function": {**PICK, "parameters": DIFFERENT}}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "model": "sapling",
        "max_tokens": 300,
        "messages": MESSAGES,
        "tools": [{**PICK, "input_schema": DIFFERENT}],
        "tool_choice": {"type": "any"},
    },
    "/v1/responses": {
        "model": "sapling",
        "input": "Pick three numbers.",
        "max_output_tokens": 300,
        "tools": [{"type": "function", **PICK, "parameters": DIFFERENT}],
        "tool_choice": "required",
    },
    "/api/chat": {
        "model": "sapling",
        "messages": MESSAGES,
        "stream": False,
        "format": DIFFERENT,
        "options": {"num_predict": 300},
    },
}


@pytest.mark.parametrize("path", PICKING)
def test_arguments_are_held_to_what_no_grammar_holds(http, path):
    reply = post(http, path, PICKING[path])

    if path == "/v1/messages":
        found = next(part["input"] for part in reply["content"] if part["type"] == "tool_use")
    elif path == "/v1/responses":
        call = next(part for part in reply["output"] if part["type"] == "function_call")
        found = json.loads(call["arguments"])
    elif path == "/api/chat":
        found = json.loads(reply["message"]["content"])
    else:
        found = json.loads(reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert len(set(found["ids"])) == len(found["ids"]) >= 3


def test_thoughts_are_free_and_the_answer_is_guarded(http):
    form = {"type": "json_schema", "json_schema": {"name": "ids", "schema": DIFFERENT}}
    body = {**CHAT, "response_format": form, "chat_template_kwargs": {"enable_thinking": True}}
    found = []
    for seed in range(4):
        reply = post(http, "/v1/chat/completions", {**body, "seed": seed, "max_tokens": 600})
        choice = reply["choices"][0]
        if choice["finish_reason"] == "stop":
            ids = json.loads(choice["message"]["content"])["ids"]
            assert len(set(ids)) == len(ids) >= 3
            found.append(choice["message"]["reasoning_content"])
    assert any(found)
