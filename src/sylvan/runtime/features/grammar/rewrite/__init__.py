"""Rewrites JSON schemas into equivalent ones of keywords that grammar libraries hold.

A rule takes keywords out of a schema and gives schemas in their place, which hold beside the rest.
What has no equivalent of bounded size is left as it is, for the library to refuse.
"""

from sylvan.runtime.features.grammar.rewrite.rewriter import Holds, Rewritten, rewrite, weakened

__all__ = ["Holds", "Rewritten", "rewrite", "weakened"]
