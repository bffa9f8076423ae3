"""Finds tool calls in model output, by model family."""

from __future__ import annotations

from sylvan.text.tools.events import ArgumentsDelta, CallStart, Event, TextDelta, ToolSpec
from sylvan.text.tools.families import ToolFamily, choose, family, options
from sylvan.text.tools.parser import ParsedTools, ToolCall, ToolParser, is_complete, parse
from sylvan.text.tools.structural import StructuralTags, calls_schema, strict_tags, structural_tags

__all__ = [
    "ArgumentsDelta",
    "CallStart",
    "Event",
    "ParsedTools",
    "StructuralTags",
    "TextDelta",
    "ToolCall",
    "ToolFamily",
    "ToolParser",
    "ToolSpec",
    "calls_schema",
    "choose",
    "family",
    "is_complete",
    "options",
    "parse",
    "strict_tags",
    "structural_tags",
]
