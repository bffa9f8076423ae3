"""Splits model output into thinking and answer, by model family."""

from __future__ import annotations

from sylvan.text.reasoning.families import ReasoningFamily, choose, family, options
from sylvan.text.reasoning.parser import ReasoningParser, make_parser, separate

__all__ = [
    "ReasoningFamily",
    "ReasoningParser",
    "choose",
    "family",
    "make_parser",
    "options",
    "separate",
]
