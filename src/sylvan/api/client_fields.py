"""Maps the engine's field names to those of a client's body."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from sylvan.api.answering import ToolUse
from sylvan.protocol.errors import RequestError, SylvanError
from sylvan.protocol.sampling import SamplingParams

TOOL_SCHEMA = "schema of a tool"
"""Key of the path to a tool's schema in an API, below `tools[i]`."""

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "choice")
_TEXTS = ("/pattern", "/grammar")
_CHAT_SCHEMA = ".function.parameters"


def grammars_in(field: str) -> Mapping[str, str]:
    """Map grammars to a body field with the engine's field names."""
    return {kind: f"{field}.{kind}" for kind in _GRAMMARS}


def with_client_field(error: SylvanError, names: Mapping[str, str]) -> SylvanError:
    """Return the error with the name that its field has in the client's body.

    Args:
        error: Any error.
        names: From engine names to client names. A key with a JSON pointer
            (`json_schema: #/items`) is a part of a grammar, matched by message prefix.
    """
    if not isinstance(error, RequestError) or error.param is None:
        return error
    message = str(error)
    parts = [
        key for key in names if ": #" in key and re.match(rf"{re.escape(key)}(?![^/ :])", message)
    ]
    if parts:
        part = max(parts, key=len)
        name = names[part]
        after = message[len(part) :]
        # a schema has JSON pointers into it; a text has none
        found = after.removeprefix(": ") if part.endswith(_TEXTS) else f"#{after}"
        return error.renamed(f"{name}: {found}", name)
    name = names.get(error.param)
    if name is None:
        return error
    message = re.sub(rf"\b{re.escape(error.param)}\b", lambda _: name, message, count=1)
    return error.renamed(message, name)


def of_tools(
    use: ToolUse, client: SamplingParams, sent: SamplingParams, names: Mapping[str, str]
) -> dict[str, str]:
    """Map the grammar made from tools; empty if the client set the grammar itself.

    Args:
        use: The tools.
        client: Sampling parameters of the client.
        sent: Sampling parameters with the grammar.
        names: Names of the route; include `TOOL_SCHEMA`.
    """
    if sent.grammar is None or sent.grammar == client.grammar:
        return {}
    kind, text = sent.grammar
    rest = names.get(TOOL_SCHEMA, _CHAT_SCHEMA)
    called = [tool.get("function", {}).get("name") for tool in use.tools]
    chosen = [i for i, name in enumerate(called) if use.choice in ("auto", "required", name)]
    found = {kind: "tools"}
    for number, tool in enumerate(chosen):
        if kind == "json_schema":  # a list of calls, of one or several forms
            schemas = [f"#/items{at}/properties/parameters" for at in ("", f"/anyOf/{number}")]
            places = dict.fromkeys([*schemas, f"#/$defs/tool{number}"], f"tools[{tool}]{rest}")
        else:
            places = {f"#/structures/{number}/schema": f"tools[{tool}]{rest}"}
            for at in ("#/format", "#/format/elements/1"):
                places[f"{at}/tags/{number}"] = f"tools[{tool}]"
                places[f"{at}/tags/{number}/content/json_schema"] = f"tools[{tool}]{rest}"
        if len(chosen) > 1:
            places.pop("#/items/properties/parameters", None)
        found |= {f"{kind}: {place}": name for place, name in places.items()}
    return found | _of_answer(text, kind, client, names)


def _of_answer(
    text: str, kind: str, client: SamplingParams, names: Mapping[str, str]
) -> dict[str, str]:
    """Map the client's own grammar, if it became an alternative to calls."""
    if client.grammar is None or kind != "structural_tag":
        return {}
    answer = json.loads(text).get("format", {}).get("elements", [{}])[0]
    inner = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
    key = inner.get(answer.get("type"))
    place = f"{kind}: #/format/elements/0" + (f"/{key}" if key else "")
    return {place: names.get(client.grammar[0], client.grammar[0])}
