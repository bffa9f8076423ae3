"""Grammars that constrain tool calls during generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.text.tools.events import ToolSpec
from sylvan.text.tools.references import moved, refers
from sylvan.text.tools.tagged import Inexpressible, TagWrapping

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Text around the JSON arguments of a call.

    Attributes:
        begin: Text before, with `NAME` for the function.
        end: Text after.
        trigger: Prefix of `begin` after which the output is constrained.
    """

    begin: str
    end: str
    trigger: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """One constrained part: `begin`, JSON of the schema, `end`."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Free text in which each trigger starts one of the tags.

    Attributes:
        tags: A tag for each function.
        triggers: Texts that start a tag.
        at_least_one: Whether the output must call a function.
    """

    tags: tuple[StructuralTag, ...]
    triggers: tuple[str, ...]
    at_least_one: bool

    def to_json(self) -> dict[str, Any]:
        """The `structural_tag` response format."""
        return {
            "type": "structural_tag",
            "structures": [
                {"begin": tag.begin, "schema": dict(tag.schema), "end": tag.end}
                for tag in self.tags
            ],
            "triggers": list(self.triggers),
            "at_least_one": self.at_least_one,
        }


def structural_tags(
    wrapping: Wrapping | None, tools: Sequence[ToolSpec], choice: str = "auto"
) -> StructuralTags | None:
    """Constraints for the calls of a request; None if the family's arguments are not JSON.

    Args:
        wrapping: The family's wrapping.
        tools: Functions of the request.
        choice: "auto", "required", or the name of a function.

    Raises:
        RequestError: there is no such function.
    """
    if wrapping is None:
        return None
    tags = tuple(
        StructuralTag(
            wrapping.begin.replace("NAME", tool.name),
            tool.parameters or _ANY_OBJECT,
            wrapping.end,
        )
        for tool in _chosen(tools, choice)
    )
    return StructuralTags(tags, (wrapping.trigger,), choice != "auto")


def strict_tags(
    wrapping: Wrapping | TagWrapping, tools: Sequence[ToolSpec], answer: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A structural tag of free text in which calls of strict functions follow their schemas.

    Functions that are not strict may be called with any object.

    Args:
        wrapping: The model's call format.
        tools: Functions of the request.
        answer: Format of an output without calls, as part of a structural tag; None: free text,
          with or without calls.

    Raises:
        RequestError: this call format cannot enforce the schema of a function.
    """
    tags = [_strict_tag(wrapping, tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    calls = {
        "type": "triggered_tags",
        "triggers": [wrapping.trigger],
        "tags": tags,
        "at_least_one": answer is not None,
        "stop_after_first": False,
    }
    form = calls if answer is None else {"type": "or", "elements": [answer, calls]}
    return {"type": "structural_tag", "format": form}


def _strict_tag(wrapping: Wrapping | TagWrapping, tool: ToolSpec, at: str) -> dict[str, Any]:
    if isinstance(wrapping, TagWrapping):
        if not tool.strict:
            return wrapping.free(tool.name)
        try:
            return wrapping.tag(tool.name, tool.parameters)
        except Inexpressible as error:
            message = f"{at} ({tool.name}): strict is not supported by this model's format of calls"
            raise RequestError(f"{message}: {error}.", param=at) from None
    schema = (tool.parameters if tool.strict else None) or _ANY_OBJECT
    return {
        "type": "tag",
        "begin": wrapping.begin.replace("NAME", tool.name),
        "content": {"type": "json_schema", "json_schema": dict(schema)},
        "end": wrapping.end,
    }


def calls_schema(
    tools: Sequence[ToolSpec], choice: str = "required", *, parallel: bool = True
) -> dict[str, Any]:
    """JSON schema of `[{"name": ..., "parameters": {...}}, ...]`.

    Args:
        tools: Functions of the request.
        choice: "required", or the name of the function to call.
        parallel: Whether several calls are allowed.

    Raises:
        RequestError: there is no such function.
    """
    definitions: dict[str, Any] = {}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool.name]},
                "parameters": _placed(tool.parameters or _ANY_OBJECT, f"tool{i}", definitions),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(_chosen(tools, choice))
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel or choice != "required":
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _chosen(tools: Sequence[ToolSpec], choice: str) -> list[ToolSpec]:
    found = [tool for tool in tools if choice in ("auto", "required", tool.name)]
    if not found:
        raise RequestError(
            f"tool_choice names {choice!r}, which is not one of the tools."
            if tools
            else f"tool_choice {choice!r} needs tools.",
            param="tool_choice",
        )
    return found


def _placed(schema: Mapping[str, Any], name: str, definitions: dict[str, Any]) -> Mapping[str, Any]:
    """Embed a schema in another; one that refers to itself becomes a definition."""
    if not refers(schema):
        return schema
    place = f"#/$defs/{name}"
    definitions[name] = moved(schema, place)
    return {"$ref": place}
