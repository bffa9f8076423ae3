"""Judges whether an answer is right; used for local models and for servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.train.data.base import Example

_THINK = re.compile(r"\A<think>\n(.*?)\n?</think>\n\n", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass
class Answer:
    """An assistant turn as the model wrote it."""

    content: str
    thought: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    stopped: bool = True


def parse_answer(text: str, *, stopped: bool) -> Answer:
    """Read reasoning and tool calls out of raw model output."""
    thought = ""
    match = _THINK.match(text)
    if match:
        thought, text = match.group(1), text[match.end() :]
    calls: list[tuple[str, Any]] = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            calls.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            calls.append(("", None))
    return Answer(_CALL.sub("", text).strip(), thought, calls, stopped)


def expected_calls(example: Example) -> list[tuple[str, Any]]:
    """Return the calls of the reference answer."""
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in example.messages[-1].get("tool_calls") or []
    ]


def is_right(example: Example, answer: Answer) -> bool:
    """Whether an answer is right: exact (equal JSON), complete, with reasoning if requested."""
    if not answer.stopped or bool(answer.thought) != example.thinking:
        return False
    calls = expected_calls(example)
    if calls or answer.calls:
        return answer.calls == calls and not answer.content
    wanted = example.messages[-1]["content"]
    if example.kind == "extract":
        try:
            return list(json.loads(answer.content).items()) == list(json.loads(wanted).items())
        except (ValueError, AttributeError):
            return False
    return answer.content == wanted


Table = dict[str, dict[str, float]]


def score(
    examples: list[Example],
    answers: list[Answer],
    on_miss: Callable[[Example, Answer], None] | None = None,
) -> Table:
    """Return the number of right answers and the total, for each class and overall."""
    table: Table = {}
    for example, answer in zip(examples, answers, strict=True):
        right = is_right(example, answer)
        if not right and on_miss is not None:
            on_miss(example, answer)
        for name in (example.kind, "overall"):
            row = table.setdefault(name, {"right": 0, "total": 0, "accuracy": 0.0})
            row["right"] += right
            row["total"] += 1
            row["accuracy"] = row["right"] / row["total"]
    table["overall"] = table.pop("overall")
    return table
