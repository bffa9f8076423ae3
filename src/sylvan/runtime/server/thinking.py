"""How many of the tokens of an output were thinking."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.server.context import Context
from sylvan.runtime.server.output import OutputRules


def count_reasoning(
    context: Context, rules: OutputRules, ids: Sequence[int], reasoning: str
) -> int:
    """Tokens up to the marker that ends thinking, markers included.

    Where that marker was merged with its neighbours, the thinking is tokenised again.
    """
    if rules.reasoning is None or not reasoning:
        return 0
    end = context.parsers.think_end_ids
    for at in range(len(ids) - len(end) + 1):
        if ids[at] == end[0] and tuple(ids[at : at + len(end)]) == end:
            return at + len(end)
    tokens = context.engine.tokenizer.encode(reasoning, add_special_tokens=False)
    return min(len(tokens), len(ids))
