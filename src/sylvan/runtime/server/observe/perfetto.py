"""Scheduler steps as trace events, which Perfetto and Chrome show on a timeline.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sylvan.protocol.steps import StepRecord

_PLANNING, _STEPS = 1, 2


def perfetto_of(steps: Mapping[int, Sequence[StepRecord]], offset_s: float) -> dict[str, Any]:
    """Convert the steps of each replica; `offset_s` converts their clock to Unix time."""
    events = [
        event for replica, own in steps.items() for event in _of_replica(replica, own, offset_s)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_replica(
    replica: int, steps: Sequence[StepRecord], offset_s: float
) -> Iterator[dict[str, Any]]:
    yield _name("process_name", replica, 0, f"scheduler {replica}")
    yield _name("thread_name", replica, _PLANNING, "planning")
    yield _name("thread_name", replica, _STEPS, "steps")
    for step in steps:
        yield _slice("plan", replica, _PLANNING, (step.planned_s, step.launched_s), offset_s)
        done_s = step.completed_s or step.launched_s
        kind = "decode" if step.decodes == step.requests else "mixed"
        kind = kind if step.decodes else "prefill"
        facts = {
            "step": step.number,
            "forward_mode": step.forward_mode,
            "drafted": step.drafted,
            "requests": step.requests,
            "decodes": step.decodes,
            "prompt_tokens": step.prompt_tokens,
            "tokens": step.tokens,
            "first_rid": step.first_rid,
            **({} if step.completed_s else {"under_way": True}),
            **({"failed": True} if step.failed else {}),
        }
        times = step.launched_s, done_s
        yield {**_slice(kind, replica, _STEPS, times, offset_s), "args": facts}
        yield {
            "name": "requests",
            "ph": "C",
            "ts": _us(step.launched_s + offset_s),
            "pid": replica,
            "args": {"running": step.running, "waiting": step.waiting},
        }


def _slice(
    name: str, replica: int, thread: int, times: tuple[float, float], offset_s: float
) -> dict[str, Any]:
    start_s, end_s = times
    return {
        "name": name,
        "ph": "X",
        "ts": _us(start_s + offset_s),
        "dur": _us(max(0.0, end_s - start_s)),
        "pid": replica,
        "tid": thread,
    }


def _name(kind: str, replica: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": replica, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
