"""Draws examples from all generators: by weight for training, by class for evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from tools.train.data import arithmetic, extract, facts, lists, memory, smalltalk, toolcalls
from tools.train.data.base import Example, belongs

Generator = Callable[[random.Random], Example]

GENERATORS: dict[str, Generator] = {
    "smalltalk": smalltalk.smalltalk,
    "unknown": smalltalk.unknown,
    "arithmetic": arithmetic.arithmetic,
    "facts": facts.facts,
    "copy": lists.copy,
    "reverse": lists.reverse,
    "sort": lists.sort,
    "count": lists.count,
    "extract": extract.extract,
    "tool_call": toolcalls.tool_call,
    "tool_parallel": toolcalls.tool_parallel,
    "tool_answer": toolcalls.tool_answer,
    "think": arithmetic.word_problem,
    "memory": memory.memory,
    "memory_empty": memory.memory_empty,
    "tool_session": toolcalls.tool_session,
    "sum_only": arithmetic.only_result,
    "sum_drill": arithmetic.drill,
    "fact_drill": facts.drill,
    "list_drill": lists.drill,
    "sort_drill": lists.sort_drill,
}

# Generators that are not classes of the evaluation table, and the class that they help.
PART_OF = {
    "memory_empty": "memory",
    "tool_session": "tool_call",
    "sum_only": "arithmetic",
    "sum_drill": "arithmetic",
    "fact_drill": "facts",
    "list_drill": "copy",
    "sort_drill": "sort",
}
CLASSES = tuple(name for name in GENERATORS if name not in PART_OF)

WEIGHTS: dict[str, float] = {
    "smalltalk": 2.0,
    "unknown": 2.5,
    "arithmetic": 13.0,
    "facts": 9.0,
    "copy": 5.5,
    "reverse": 10.0,
    "sort": 28.0,
    "count": 7.0,
    "extract": 10.0,
    "tool_call": 3.0,
    "tool_parallel": 6.0,
    "tool_answer": 1.5,
    "think": 5.0,
    "memory": 4.5,
    "memory_empty": 0.7,
    "tool_session": 1.5,
    "sum_only": 6.5,
    "sum_drill": 8.0,
    "fact_drill": 2.5,
    "list_drill": 9.0,
    "sort_drill": 8.0,
}

# The last part of a run leans towards the classes that are learnt last, by these factors.
FINISH: dict[str, float] = {
    "sort": 2.0,
    "sort_drill": 1.6,
    "reverse": 1.8,
    "list_drill": 1.6,
    "sum_only": 1.3,
}

_THOUGHTS = {
    "smalltalk": "This is small talk.",
    "unknown": "I cannot do this.",
    "arithmetic": "This is a sum.",
    "facts": "This is a fact that I know.",
    "copy": "I copy the text.",
    "reverse": "I reverse the list.",
    "sort": "I sort the list.",
    "count": "I count.",
    "extract": "I write the fields as JSON.",
    "memory": "I look at what I was told.",
    "memory_empty": "I look at what I was told.",
    "tool_call": "I look at the tools.",
    "tool_parallel": "I need two calls.",
    "tool_answer": "I read the result.",
}
THINK_CHANCE = 0.06


def draw(name: str, rng: random.Random, split: str) -> Example:
    """Draw an example of a generator that belongs to a split."""
    while True:
        example = GENERATORS[name](rng)
        if not belongs(example, split):
            continue
        if name in _THOUGHTS and rng.random() < THINK_CHANCE:
            example.thinking = True
            example.messages[-1]["reasoning_content"] = _THOUGHTS[name]
        return example


def stream(seed: int, weights: Mapping[str, float] = WEIGHTS) -> Iterator[Example]:
    """Yield training examples forever; `weights` may be changed meanwhile."""
    rng = random.Random(seed)
    while True:
        names = list(weights)
        name = rng.choices(names, [weights[one] for one in names])[0]
        yield draw(name, rng, "train")


def evaluation_set(seed: int, per_class: int, split: str = "test") -> list[Example]:
    """Return the same number of distinct held-out examples of every class."""
    examples: list[Example] = []
    for name in CLASSES:
        rng = random.Random(f"{seed}:{split}:{name}")
        seen: set[tuple[str, str]] = set()
        while len(seen) < per_class:
            source = "memory_empty" if name == "memory" and rng.random() < 0.1 else name
            example = draw(source, rng, split)
            mark = (example.keys[0], example.messages[-2]["content"])
            if mark not in seen:
                seen.add(mark)
                examples.append(example)
    return examples
