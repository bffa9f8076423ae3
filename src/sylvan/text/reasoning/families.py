"""Reasoning formats by name; families that share a rule differ by a row of the table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.text.reasoning.channels import HARMONY, MUSE, Channels

_OFF = (False, "disabled", "off", "false", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """Markers of thinking in the output of a model family.

    Attributes:
        name: Option name.
        starts: Markers that start thinking; the first is the usual one.
        ends: Markers that end thinking; the first is the usual one.
        forced: Whether the output starts within thinking without a marker.
        toggle: Template variable that decides whether the output starts within thinking, and its
          default.
        interrupts: Markers of tool calls that also end thinking; they stay in the answer.
        leads: White space that may precede a start marker.
        headers: Headers that may precede the answer, at the start of the output or after the
          thinking.
        call_headers: Headers that may precede a call.
        drops: Markers around the answer, which are removed.
        stray_end: Whether an answer without thinking may start with an end marker to remove.
        inner_call: Markers around calls in thinking; thinking may then start anywhere and continue.
        keeps_tags: Whether everything is answer, with the start marker prepended.
        channels: Message format, for families with channels instead of markers.
    """

    name: str
    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    forced: bool = False
    toggle: tuple[str, Any] | None = None
    interrupts: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    call_headers: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    stray_end: bool = False
    inner_call: tuple[str, str] | None = None
    keeps_tags: bool = False
    channels: Channels | None = None

    def starts_in_reasoning(
        self, prompt: str = "", template_kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether the output starts inside thinking.

        A marker at the end of the prompt decides; else the template variables of the request; else
        the family's default.
        """
        tail = prompt[-256:].rstrip()
        if tail.endswith(self.starts):
            return True
        if tail.endswith(self.ends):
            return False
        if self.toggle is not None:
            name, default = self.toggle
            return (template_kwargs or {}).get(name, default) in (True, "enabled", "on", "true")
        return self.forced

    def leaves_open(self, message: str) -> bool:
        """Whether a message that the model continues ends inside thinking."""
        started = max(message.rfind(mark) for mark in self.starts)
        return started > max(message.rfind(mark) for mark in self.ends)

    def may_start_reasoning(
        self, prompt: str = "", template_kwargs: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether the model may start thinking by itself, as far as the request allows.

        It may not if the prompt ends the thinking, or the request disables it.
        """
        given = template_kwargs or {}
        if prompt[-256:].rstrip().endswith(self.ends):
            return False
        if self.toggle is not None and given.get(*self.toggle) in _OFF:
            return False
        names = ("enable_thinking", "thinking", "reasoning_effort")
        return not any(given.get(name) in _OFF for name in names)


def _same(*names: str, **fields: Any) -> list[ReasoningFamily]:
    return [ReasoningFamily(name=name, **fields) for name in names]


_CALL = ("<tool_call>",)
_KIMI_TOOLS = "<|tool_calls_section_begin|>"
_TABLE = (
    *_same("deepseek-r1", "step3", "step3p5", "gigachat35", forced=True),
    *_same("qwen3-thinking", "minimax", forced=True, interrupts=_CALL),
    *_same("qwen3", "dots", "nanbeige", "interns1", interrupts=_CALL),
    *_same("deepseek-v3", toggle=("thinking", False), interrupts=_CALL),
    *_same("deepseek-v4", "deepseek-v41", toggle=("thinking", False)),
    *_same("glm45", leads=("\n",), interrupts=_CALL),
    *_same("ling3", "mimo", "poolside_v1", interrupts=_CALL),
    *_same("iquest_q1"),
    *_same("nemotron_3", toggle=("enable_thinking", True), interrupts=_CALL),
    *_same("granite_thinking_parser", toggle=("thinking", False), interrupts=_CALL),
    *_same("kimi_k2", interrupts=(_KIMI_TOOLS,)),
    *_same("hunyuan", interrupts=("<tool_calls>",)),
    *_same("minimax-append-think", keeps_tags=True),
    *_same(
        "minimax-m3",
        starts=("<mm:think>",),
        ends=("</mm:think>",),
        toggle=("thinking_mode", "auto"),
        stray_end=True,
    ),
    *_same("kimi", starts=("\u25c1think\u25b7",), ends=("\u25c1/think\u25b7",)),
    *_same(
        "kimi_k3",
        starts=("<|open|>think<|sep|>",),
        ends=("<|close|>think<|sep|>",),
        interrupts=("<|open|>tools<|sep|>",),
    ),
    *_same(
        "k2_horizon",
        starts=("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ends=("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        interrupts=("<ifm|tool_calls>", "<ifm|tool_call>"),
    ),
    *_same(
        "gpt-oss",
        starts=("<|channel|>analysis<|message|>",),
        ends=("<|end|>",),
        headers=(
            "<|channel|>final<|message|>",
            "<|start|>assistant<|channel|>final<|message|>",
        ),
        call_headers=("<|start|>assistant",),
        channels=HARMONY,
    ),
    *_same("mistral", starts=("[THINK]",), ends=("[/THINK]",)),
    *_same("gemma4", starts=("<|channel>thought",), ends=("<channel|>",)),
    *_same("inkling", starts=("<|content_thinking|>",), ends=("<|end_message|>",)),
    *_same(
        "apertus2509",
        starts=("<|inner_prefix|>",),
        ends=("<|inner_suffix|>",),
        interrupts=("<|tools_prefix|>",),
        inner_call=("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    *_same(
        "cohere_command4",
        starts=("<|START_THINKING|>",),
        ends=("<|END_THINKING|>",),
        headers=("<|START_TEXT|>",),
        drops=("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    *_same(
        "muse",
        starts=(" to=self<|message|>", "to=self<|message|>"),
        ends=("<|eom|>",),
        headers=(
            " to=user<|message|>",
            "to=user<|message|>",
            "<|start|>assistant to=user<|message|>",
        ),
        channels=MUSE,
    ),
)
_FAMILIES = {entry.name: entry for entry in _TABLE}
# formats that a checkpoint's own chat template defines
_FROM_TEMPLATE = ("beam", "response_template")

# substrings of a chat template that identify the family; the first match decides
_SIGNS = (
    ("<|channel|>analysis", "gpt-oss"),
    ("[THINK]", "mistral"),
    ("<mm:think>", "minimax-m3"),
    ("\u25c1think\u25b7", "kimi"),
    ("<|channel>", "gemma4"),
    ("<|inner_prefix|>", "apertus2509"),
    ("<|START_THINKING|>", "cohere_command4"),
    ("<|open|>", "kimi_k3"),
    ("<ifm|", "k2_horizon"),
    ("<|content_thinking|>", "inkling"),
    ("to=self", "muse"),
    (_KIMI_TOOLS, "kimi_k2"),
    ("<minimax:tool_call>", "minimax"),
    ("<tool_sep>", "hunyuan"),
    ("<arg_key>", "glm45"),
    ("<\uff5cDSML\uff5c", "deepseek-v4"),
    ("<\uff5cAssistant\uff5c><think>", "deepseek-r1"),
    ("thinking is defined and thinking", "deepseek-v3"),
    ("<\uff5cAssistant\uff5c>", "deepseek-v3"),
    ("think>", "qwen3"),
)
_THINKS = ("think", "THINK", "analysis", "<|channel>", "<|inner_prefix|>", "to=self")


def options() -> tuple[str, ...]:
    """Every name that `family` accepts."""
    return tuple(sorted((*_FAMILIES, *_FROM_TEMPLATE, "auto")))


def family(name: str, *, chat_template: str = "") -> ReasoningFamily | None:
    """Look up a family; None if `auto` finds that the model has no thinking.

    Raises:
        ConfigError: There is no such family.
    """
    if name == "auto":
        return choose(chat_template)
    if name in _FROM_TEMPLATE:
        found = choose(chat_template)
        if found is None:
            raise ConfigError(f"Reasoning parser {name!r} needs a chat template with markers.")
        return replace(found, name=name)
    if name not in _FAMILIES:
        near = difflib.get_close_matches(name, options(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"There is no reasoning parser {name!r}.{hint}")
    return _FAMILIES[name]


def choose(chat_template: str) -> ReasoningFamily | None:
    """The family whose markers the chat template contains, or None."""
    if not any(sign in chat_template for sign in _THINKS):
        return None
    name = next((name for sign, name in _SIGNS if sign in chat_template), None)
    return _FAMILIES[name] if name else None
