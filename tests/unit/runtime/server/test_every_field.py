"""Every field of every body is read by someone, refused by name, or listed in the answer."""

from __future__ import annotations

import ast
import copy
import itertools
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
import pytest
from pydantic.fields import FieldInfo

import sylvan
from sylvan.api.extras import NO_EFFECT, READ_ELSEWHERE, REFUSED
from sylvan.api.validation import WireModel
from sylvan.runtime.server.endpoint import IGNORED_HEADER, Endpoint
from sylvan.runtime.server.routes import ENDPOINTS
from tests.support.http import Client, checkpoint, client, engine

__all__ = ["checkpoint", "client", "engine"]

CHAT = [{"role": "user", "content": "x"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
TALK = [
    *PARTS,
    {"role": "assistant", "content": "y", "tool_calls": [CALL]},
    {"role": "tool", "content": "z", "tool_call_id": "c"},
]
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
OLLAMA = {"model": "m", "stream": False}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "tools": [TOOL], "logprobs": True},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "model": "m",
        "messages": PARTS,
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": PARTS},
    "/generate": {"text": "x"},
    "/tokenize": {"messages": CHAT, "tools": [TOOL]},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {**OLLAMA, "messages": CHAT, "logprobs": True},
    "/api/generate": {**OLLAMA, "prompt": "x", "logprobs": True},
    "/open_session": {"capacity_of_str_len": 9},
    "/close_session": {"session_id": "x"},
    "/v1/conversations": {},
    "/abort_request": {"rid": "x"},
    "/parse_function_call": {"text": "x", "tools": [TOOL], "tool_call_parser": "qwen"},
    "/separate_reasoning": {"text": "x", "reasoning_parser": "qwen3"},
}
"""Bodies in which every object is right, so that a field can be added to any of them."""
VALUES: dict[str, Any] = {
    "json_schema": {"name": "n", "schema": {"type": "object"}},
    "structural_tag": {"structures": [], "triggers": []},
    "response_format": {"type": "json_object"},
    "function_call": "auto",
    "functions": [FUNCTION],
    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]},
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "format": SCHEMA,
    "prompt": "x",
}
"""Values that a field needs to be more than a wrong one."""
OBJECTS: dict[str, Any] = {
    "NamedFunction": {"name": "f"},
    "AllowedChoice": {"type": "allowed_tools", "allowed_tools": VALUES["allowed_tools"]},
    "ResponsesChoice": {"type": "function", "name": "f"},
    "TextFormat": SCHEMA,
    "OutputFormat": {"type": "json_schema", "schema": {"type": "object"}},
    "ResponseFormat": {"type": "json_schema", "json_schema": VALUES["json_schema"]},
    "JsonSchema": VALUES["json_schema"],
    "SessionParams": {"id": "x"},
    "ThinkingConfig": {"type": "enabled", "budget_tokens": 2048},
    "ToolReference": {"type": "function", "name": "f"},
    "FunctionTool": FUNCTION,
    "ChatTool": TOOL,
    "Block": {"type": "text", "text": "x"},
    "StreamOptions": {},
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Model and name of each field of a body that anybody reads."""
    seen: set[tuple[str, str]] = set()

    def get(self: WireModel, name: str) -> Any:
        if name in type(self).__pydantic_fields__:
            seen.update((kind.__name__, name) for kind in type(self).__mro__)
        return object.__getattribute__(self, name)

    def dump(self: WireModel, **options: Any) -> Any:
        _read_all(self, options.get("include"), seen)
        return original(self, **options)

    original = WireModel.model_dump
    monkeypatch.setattr(WireModel, "__getattribute__", get)
    monkeypatch.setattr(WireModel, "model_dump", dump)
    return seen


def _read_all(body: WireModel, include: Any, seen: set[tuple[str, str]]) -> None:
    for name, value in body.__dict__.items():
        if include is None or name in include:
            seen.update((kind.__name__, name) for kind in type(body).__mro__)
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, WireModel):
                    _read_all(item, None, seen)


def fields_of(model: type[WireModel], path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Path, model and field of all fields, also of the objects inside."""
    for name, field in model.model_fields.items():
        if _is_constant(field.annotation):
            continue
        here = (*path, field.alias or name)
        yield here, model, name
        for inner in models_in(field.annotation):
            if inner.__name__ not in path and len(path) < 3:
                yield from fields_of(inner, here)


def _is_constant(kind: Any) -> bool:
    """Whether there is one value that is not refused."""
    inner = [x for x in get_args(kind) if x is not type(None)]
    if get_origin(kind) in (typing.Union, types.UnionType):
        return len(inner) == 1 and _is_constant(inner[0])
    return get_origin(kind) is Literal and len({str(x).lower() for x in inner}) == 1


def models_in(kind: Any) -> Iterator[type[WireModel]]:
    if isinstance(kind, type) and issubclass(kind, WireModel):
        yield kind
    elif get_origin(kind) is not dict:
        for inner in get_args(kind):
            yield from models_in(inner)


def value_of(kind: Any, name: str = "", least: float = 0) -> Any:
    """A value of a type that asks for something."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [m for m in inner[1:] if isinstance(m, FieldInfo)]
        marks = [m for b in bounds for m in b.metadata]
        ge = next((m.ge for m in marks if isinstance(m, annotated_types.Ge)), 0)
        pattern = any("pattern" in repr(m) for m in marks)
        return "resp_x" if pattern else value_of(inner[0], name, max(0, ge))
    if origin in (typing.Union, types.UnionType):
        return value_of(next(x for x in inner if x is not type(None)), name, least)
    if origin is Literal:
        return inner[-1]
    if origin is list:
        return [value_of(inner[0], name)]
    if origin is dict:
        return {"1": 1.5} if inner[1] is float else {"x": "y"}
    if isinstance(kind, type) and issubclass(kind, WireModel):
        return object_of(kind)
    return {bool: True, int: max(1, least), float: 0.5, str: "x"}.get(kind, "x")


def object_of(model: type[WireModel]) -> dict[str, Any]:
    """The least object that a model takes."""
    if model.__name__ in OBJECTS:
        return copy.deepcopy(OBJECTS[model.__name__])
    return {
        field.alias or name: VALUES.get(name) or value_of(field.annotation, name)
        for name, field in model.model_fields.items()
        if field.is_required()
    }


def body_with(endpoint: Endpoint, path: tuple[str, ...], model: type[WireModel], name: str) -> Any:
    """A body that has the field; None if the value in the base suffices."""
    assert endpoint.body is not None
    body = copy.deepcopy(BASES[endpoint.path])
    if path[0] in ("functions", "function_call"):
        body.update(functions=[copy.deepcopy(FUNCTION)], tools=None)
    at, kind = body, endpoint.body
    for part, following in itertools.pairwise(path):
        field = next(f for n, f in kind.model_fields.items() if (f.alias or n) == part)
        inside = (m for m in models_in(field.annotation) if _leads_to(m, model))
        kind = next(m for m in inside if following in _names(m))
        found = at.get(part)
        if isinstance(found, list) and found and isinstance(found[-1], dict):
            at = found[-1]
            continue
        if not isinstance(found, dict):
            found = object_of(kind)
            at[part] = [found] if "list[" in str(field.annotation) else found
        at = found
    if path[-1] not in at:
        value = VALUES.get(name)
        at[path[-1]] = (
            value_of(model.model_fields[name].annotation, name) if value is None else value
        )
    return body


def _names(kind: type[WireModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


def _leads_to(kind: type[WireModel], model: type[WireModel]) -> bool:
    if issubclass(kind, model):
        return True
    inside = (m for f in kind.model_fields.values() for m in models_in(f.annotation))
    return any(_leads_to(m, model) for m in inside)


def bodies() -> dict[type[WireModel], Endpoint]:
    """One route for each body."""
    found: dict[type[WireModel], Endpoint] = {}
    for endpoint in ENDPOINTS:
        if endpoint.body is not None and not endpoint.missing_feature:
            found.setdefault(endpoint.body, endpoint)
    return found


@pytest.mark.parametrize("path", list(BASES))
async def test_fields_are_read_refused_or_listed(
    client: Client, reads: set[tuple[str, str]], path: str
) -> None:
    endpoint = next(e for e in ENDPOINTS if e.path == path and e.body is not None)
    assert endpoint.body is not None
    silent: list[str] = []
    await client.post("/open_session", {"capacity_of_str_len": 9, "session_id": "x"})
    for at, model, name in fields_of(endpoint.body):
        body = body_with(endpoint, at, model, name)
        reads.clear()
        method = "POST" if "POST" in endpoint.methods else endpoint.methods[0]
        response = await client.http.request(method, endpoint.path, json=body)
        listed = response.headers.get(IGNORED_HEADER, "")
        told = any(part in listed for part in at) or (
            response.status_code >= 400 and at[-1] in response.text
        )
        if not told and (model.__name__, name) not in reads:
            silent.append(f"{'.'.join(at)}: {response.status_code} {response.text[:200]}")
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_names_of_other_servers_are_refused_or_listed(client: Client, path: str) -> None:
    body = {"messages": CHAT, "prompt": "x", "text": "x"}
    name = {"/generate": "text", "/v1/completions": "prompt"}.get(path, "messages")
    known = {n for e in ENDPOINTS if e.path == path and e.body for n in e.body.model_fields}
    for field in sorted((NO_EFFECT | set(REFUSED)) - known - READ_ELSEWHERE):
        response = await client.post(path, {name: body[name], field: "asks"})
        if response.status_code == 200:
            assert field in response.headers.get(IGNORED_HEADER, ""), field
        else:
            assert response.status_code == 400
            assert field in response.text


async def test_names_inside_objects_are_listed(client: Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}]}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "f", "bar": 2}},
        "stream_options": {"baz": 3},
        "response_format": {"type": "text", "quux": {}},
    }
    response = await client.post("/v1/chat/completions", body)

    listed = response.headers[IGNORED_HEADER].split(", ")
    assert set(listed) >= {"messages[0].content[0].foo", "tool_choice.function.bar"}
    assert set(listed) >= {"stream_options.baz", "response_format.quux"}


async def test_headers_without_an_effect_are_listed(client: Client) -> None:
    given = {"x-override-priority": "3", "x-sglext-ids-framed": "1", "x-other": "1"}
    reply = await client.post("/generate", {"text": "x"}, headers=given)

    assert reply.headers[IGNORED_HEADER] == "x-override-priority, x-sglext-ids-framed"


def test_fields_of_all_other_bodies_have_a_reader() -> None:
    """Of bodies that need another model or server: some code reads an attribute of that name."""
    read: set[str] = set()
    for file in (Path(sylvan.__file__).parent).rglob("*.py"):
        if file.parts[-2] in ("runtime", "lang", "gateway", "kernels", "sim"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    lacking = [
        f"{body.__name__}: {'.'.join(at)}"
        for body, endpoint in bodies().items()
        if endpoint.path not in BASES
        for at, _, name in fields_of(body)
        if name not in read | set(body.model_construct().without_effect)
    ]
    assert not lacking
