"""Grammars that cannot be compiled, sent to a real server by every API: each fails alone, and says
what of the body is wrong, as the client spelt it."""

from __future__ import annotations

import json

import httpx
import pytest

MESSAGES = [{"role": "user", "content": "How is the weather?"}]
NOPE = {"type": "object", "properties": {"a": {"type": "nope"}}}
HERE = "#/properties/a/type"
DEFINED = {"name": "w", "schema": NOPE}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<w>", "schema": NOPE, "end": "</w>"}],
    "triggers": ["<w>"],
}
NEW_TAGS = {
    "type": "structural_tag",
    "format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "ab(c"}]},
}
OBJECT = {"type": "object"}


@pytest.fixture(scope="module")
def http(sapling):
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=sapling.url, headers=headers, timeout=240) as client:
        yield client


def native(**grammar):
    return "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4, **grammar}}


def chat(**fields):
    body = {"model": "sapling", "messages": MESSAGES, "max_tokens": 4, **fields}
    return "/v1/chat/completions", body


def tool(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def completion(**fields):
    return "/v1/completions", {"model": "sapling", "prompt": "x", "max_tokens": 4, **fields}


def responses(**fields):
    return "/v1/responses", {"model": "sapling", "input": "x", "max_output_tokens": 4, **fields}


def anthropic(**fields):
    body = {"model": "sapling", "messages": MESSAGES, "max_tokens": 4, **fields}
    return "/v1/messages", body


def ollama(path, **fields):
    text = {"messages": MESSAGES} if path == "/api/chat" else {"prompt": "x"}
    return path, {"model": "sapling", "stream": False, **text, **fields}


ASKED = "response_format.json_schema.schema"
TEXT = {"format": {"type": "json_schema", "name": "w", "schema": NOPE}}
OUTPUT = {"format": {"type": "json_schema", "schema": NOPE}}
LISTED = {"name": "bad", "input_schema": NOPE}
FORCED = {"tools": [tool("good", OBJECT), tool("bad", NOPE)], "tool_choice": "required"}
STRICT = tool("bad", NOPE)
STRICT["function"]["strict"] = True

# what is sent, the field that is to be blamed, the place in it
CASES = {
    "native-json_schema": (
        native(json_schema=json.dumps(NOPE)), "sampling_params.json_schema", HERE,
    ),
    "native-regex": (native(regex="ab(a"), "sampling_params.regex", "at position 3"),
    "native-ebnf": (native(ebnf='root ::= "a"\nb ::= ('), "sampling_params.ebnf", "line 2"),
    "native-tag": (
        native(structural_tag=json.dumps(TAGS)),
        "sampling_params.structural_tag",
        "#/structures/0/schema/properties/a/type",
    ),
    "vertex": (
        ("/vertex_generate", {
            "instances": [{"text": "x"}], "parameters": {"sampling_params": {"regex": "(a"}},
        }),
        "parameters.sampling_params.regex",
        "at position 1",
    ),
    "chat-json_schema": (
        chat(response_format={"type": "json_schema", "json_schema": DEFINED}), ASKED, HERE,
    ),
    "chat-own-json_schema": (chat(json_schema=NOPE), "json_schema", HERE),
    "chat-regex": (chat(regex="a{2"), "regex", "at position 2"),
    "chat-ebnf": (chat(ebnf="root ::= b"), "ebnf", "line 1"),
    "chat-tags": (
        chat(response_format=TAGS), "response_format", "#/structures/0/schema/properties/a/type",
    ),
    "chat-new-tags": (
        chat(response_format=NEW_TAGS), "response_format",
        "#/format/elements/0/pattern: at position 3",
    ),
    "chat-forced": (chat(**FORCED), "tools[1].function.parameters", HERE),
    "chat-named": (
        chat(**FORCED | {"tool_choice": {"type": "function", "function": {"name": "bad"}}}),
        "tools[1].function.parameters",
        HERE,
    ),
    "chat-strict": (
        chat(tools=[tool("good", OBJECT), STRICT]), "tools[1].function.parameters", HERE,
    ),
    "chat-stream": (
        chat(stream=True, response_format={"type": "json_schema", "json_schema": DEFINED}),
        ASKED,
        HERE,
    ),
    "invocations": (
        ("/invocations", chat(regex="(a")[1]), "regex", "at position 1",
    ),
    "completion": (
        completion(response_format={"type": "json_schema", "json_schema": DEFINED}), ASKED, HERE,
    ),
    "responses": (responses(text=TEXT), "text.format.schema", HERE),
    "responses-stream": (responses(text=TEXT, stream=True), "text.format.schema", HERE),
    "responses-forced": (
        responses(
            tools=[{"type": "function", "name": "bad", "parameters": NOPE}], tool_choice="required"
        ),
        "tools[0].parameters",
        HERE,
    ),
    "anthropic": (anthropic(output_config=OUTPUT), "output_config.format.schema", HERE),
    "anthropic-forced": (
        anthropic(tools=[LISTED], tool_choice={"type": "any"}), "tools[0].input_schema", HERE,
    ),
    "ollama-chat": (ollama("/api/chat", format=NOPE), "format", HERE),
    "ollama-generate": (ollama("/api/generate", format=NOPE), "format", HERE),
    "ollama-stream": (ollama("/api/chat", format=NOPE, stream=True), "format", HERE),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_field_is_named_as_the_client_spelt_it(http, case):
    (path, body), field, place = CASES[case]

    reply = http.post(path, json=body)

    assert reply.status_code == 400, reply.text
    found = reply.json()
    detail = found.get("error", found)
    message = detail if isinstance(detail, str) else detail["message"]
    assert message.startswith(f"{field}: "), message
    assert place in message
    if not isinstance(detail, str) and "param" in detail:
        assert detail["param"] == field


@pytest.mark.slow
def test_a_response_made_in_the_background_says_it_too(http):
    path, body = responses(text=TEXT, background=True)
    reply = http.post(path, json=body).json()
    while reply["status"] in ("queued", "in_progress"):
        reply = http.get(f"{path}/{reply['id']}").json()

    assert reply["status"] == "failed"
    assert reply["error"]["message"].startswith(f"text.format.schema: {HERE}")


def nested(depth):
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


ENDLESS = {
    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/a"}},
    "required": ["x"],
}
HARD = {
    "exponential pattern": (
        {"json_schema": json.dumps({"type": "string", "pattern": f"^{'(' * 7}a{'{40})' * 7}$"})},
        "too many",
    ),
    "recursion without end": ({"json_schema": json.dumps(ENDLESS)}, "#/$defs/b/$ref refers back"),
    "endless rule": ({"ebnf": "root ::= root"}, "no text"),
    "5 MB": ({"json_schema": '{"enum": ["' + "x" * (5 << 20) + '"]}'}, "at most 4194304"),
    "deep schema": ({"json_schema": nested(500)}, "at most 128"),
    "deeper schema": ({"json_schema": nested(100_000)}, "not valid JSON"),
    "deep regex": ({"regex": "(" * 300 + "a" + ")" * 300}, "at most 128"),
}  # fmt: skip


LAZY = ["(a|b)*a(a|b){200}", "((a+)+)+b", "(.*.*.*.*.*.*.*.*x){50}", "[a-z]{1,100000}"]


@pytest.mark.slow
@pytest.mark.parametrize("regex", LAZY)
def test_what_is_exponential_only_for_others_is_held(http, regex):
    """Their automata as a whole fit nowhere; only the states on the way are made."""
    path, body = native(regex=regex, max_new_tokens=40, sampling_seed=1)

    reply = http.post(path, json=body)

    assert reply.status_code == 200, reply.text
    text = reply.json()["text"]
    assert text
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz") or "." in regex


@pytest.mark.slow
@pytest.mark.parametrize("case", HARD)
def test_what_is_too_hard_is_refused_and_the_next_is_served(http, case):
    grammar, reason = HARD[case]
    path, body = native(**grammar)

    reply = http.post(path, json=body)

    assert reply.status_code == 400, reply.text[:500]
    assert reason in reply.json()["error"]["message"]
    again = http.post(*native(regex="(yes|no)!")[:1], json=native(regex="(yes|no)!")[1])
    assert again.status_code == 200, again.text
    assert again.json()["text"] in ("yes!", "no!")


def test_an_object_as_deep_as_that_in_a_body_is_refused(http):
    deep = json.loads(nested(400))
    reply = http.post(*chat()[:1], json=chat(json_schema=deep)[1])

    assert reply.status_code == 400
    assert http.post(chat()[0], json=chat(regex="(yes|no)!")[1]).status_code == 200
