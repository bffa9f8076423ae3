"""Where outputs think, and how many of their tokens were thinking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.protocol.requests import Thinking
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.parsers import Parsers
from sylvan.text.output import OutputRules


@dataclass(frozen=True, slots=True)
class Bound:
    """A grammar beside thinking.

    Attributes:
        may_open: The model may open its thinking by itself before the grammar begins; else the
            grammar begins with the output, unless that goes on with thinking.
        calls: The grammar constrains calls, as the model writes them.
        text: The grammar allows text as well as calls, or has no calls.
    """

    may_open: bool
    calls: bool = False
    text: bool = True


def thinking_of(
    parsers: Parsers,
    *,
    inside: bool,
    budget: int | None,
    bound: Bound | None = None,
    calls: bool = False,
) -> Thinking | None:
    """What the engine is told about thinking; None for a model that does not think.

    A budget is a bound, so that a model that does not think keeps to it.

    Args:
        parsers: The markers.
        inside: The output goes on with thinking.
        budget: Most tokens of it.
        bound: The grammar beside it.
        calls: The request has functions, and a call of one ends thinking.
    """
    family, starts = parsers.reasoning, parsers.think_starts
    if family is None or not parsers.think_ends:
        return None
    if bound is None:
        if budget is None and not inside:
            return None
        ends = parsers.think_ends if calls else parsers.think_ends[: len(family.ends)]
        return Thinking(ends=ends, starts=starts, inside=inside, budget=budget)
    headers = (
        *(parsers.headers if bound.text else ()),
        *(parsers.call_headers if bound.calls else ()),
    )
    starts = starts if bound.may_open and budget != 0 else ()
    if not (inside or starts or headers):
        return None
    return Thinking(
        # a call ends thinking where the grammar has calls
        ends=parsers.think_ends if bound.calls else parsers.think_ends[: len(family.ends)],
        starts=starts,
        headers=headers,
        inside=inside,
        budget=budget,
    )


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
