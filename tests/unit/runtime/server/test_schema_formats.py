"""Unknown formats are named in a header; they do not constrain values."""

from __future__ import annotations

import json

import pytest

from sylvan.runtime.server.schema_formats import MAX_PARTS, unknown_formats
from tests.support.http import Client

ODD = {"type": "object", "properties": {"a": {"type": "string", "format": "color"}}}
BODIES = {
    "chat": {"response_format": {"json_schema": {"name": "x", "schema": ODD}}},
    "tools": {"tools": [{"function": {"name": "f", "parameters": ODD}}]},
    "anthropic": {"tools": [{"name": "f", "input_schema": ODD}]},
    "responses": {"text": {"format": {"type": "json_schema", "schema": ODD}}},
    "ollama": {"format": ODD},
    "native": {"sampling_params": {"json_schema": json.dumps(ODD)}},
    "tags": {"response_format": {"structures": [{"begin": "<", "schema": ODD, "end": ">"}]}},
}


@pytest.mark.parametrize("name", BODIES)
def test_unknown_formats_are_found_wherever_schemas_stand(name):
    assert unknown_formats(BODIES[name]) == ["color"]


@pytest.mark.parametrize(
    "body",
    [
        {"format": "json"},
        {"messages": [{"content": [{"input_audio": {"data": "", "format": "wav"}}]}]},
        {"response_format": {"schema": {"format": "date-time"}}},
        {"response_format": {"schema": {"properties": {"format": {"type": "string"}}}}},
        {"response_format": {"schema": {"const": {"format": "color"}, "enum": [{"format": "x"}]}}},
        {"sampling_params": {"json_schema": '{"format": '}},
        {"sampling_params": {"json_schema": '{"format": ' * 2000}},
    ],
)
def test_what_is_no_unknown_format_is_not_named(body):
    assert unknown_formats(body) == []


def test_work_is_bounded():
    many = [{"format": f"f{i}"} for i in range(4 * MAX_PARTS)]

    assert 0 < len(unknown_formats({"schema": many})) < MAX_PARTS


async def test_the_header_names_them(engine):
    client = Client(engine)
    schema = {"type": "string", "format": "color"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}

    named = await client.http.post("/v1/chat/completions", json=body)
    schema["format"] = "date"
    known = await client.http.post("/v1/chat/completions", json=body)

    assert named.status_code == known.status_code == 200
    assert named.headers["x-sylvan-unknown-formats"] == "color"
    assert "x-sylvan-unknown-formats" not in known.headers
