"""Grammars for calls that are constrained while they are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.text.tools.events import ToolSpec

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Text around the JSON arguments of a call.

    Attributes:
        begin: What stands before, with `NAME` for the function.
        end: What stands after.
        trigger: Beginning of `begin` from which on the output is constrained.
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
        tags: One for each function.
        triggers: What starts a tag.
        at_least_one: The output has to call a function.
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
        wrapping: The family's.
        tools: Functions of the request.
        choice: "auto", "required", or the name of a function.

    Raises:
        RequestError: There is no function of that name.
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


def calls_schema(
    tools: Sequence[ToolSpec], choice: str = "required", *, parallel: bool = True
) -> dict[str, Any]:
    """JSON schema of `[{"name": ..., "parameters": {...}}, ...]`.

    Args:
        tools: Functions of the request.
        choice: "required", or the name of the function to call.
        parallel: Several calls are allowed.

    Raises:
        RequestError: There is no function of that name.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool.name]},
                "parameters": _without_definitions(tool.parameters or _ANY_OBJECT),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in _chosen(tools, choice)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel or choice != "required":
        schema["maxItems"] = 1
    if definitions := _definitions(tools):
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


def _without_definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "$defs"}


def _definitions(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for tool in tools:
        for name, value in tool.parameters.get("$defs", {}).items():
            if merged.setdefault(name, value) != value:
                raise RequestError(
                    f"tools define {name!r} differently in their $defs.", param="tools"
                )
    return merged
