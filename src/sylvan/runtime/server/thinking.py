"""How many tokens of an output were thinking."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.runtime.server.context import Context
from sylvan.text.output import OutputRules


def count_reasoning(
    context: Context, rules: OutputRules, ids: Sequence[int], reasoning: str
) -> int:
    """Tokens up to the marker that ends thinking, markers included; all if there is none.

    Where that marker was merged with its neighbours, the thinking is tokenised again.
    """
    family, tokenizer = rules.reasoning, context.engine.tokenizer
    if family is None or not reasoning:
        return 0
    ends = context.parsers.think_ends
    for at in range(len(ids)):
        for end in ends[: len(family.ends)]:
            if ids[at] == end[0] and tuple(ids[at : at + len(end)]) == end:
                return at + len(end)
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    if not any(mark in text for mark in (*family.ends, *family.interrupts)):
        return len(ids)
    tokens = tokenizer.encode(reasoning, add_special_tokens=False)
    return min(len(tokens), len(ids))
