"""Rewrites JSON schemas into equivalent ones that grammar libraries support.

A rule removes keywords from a schema and replaces them with schemas that apply beside the rest.
Keywords without an equivalent of bounded size are left for the library to reject.
"""

from sylvan.runtime.features.grammar.rewrite.rewriter import (
    Rewritten,
    SupportedKeywords,
    rewrite,
    weakened,
)

__all__ = ["Rewritten", "SupportedKeywords", "rewrite", "weakened"]
