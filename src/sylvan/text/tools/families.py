"""Tool-call formats by name; families that share a grammar differ by a row of the table."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sylvan.protocol.errors import ConfigError
from sylvan.text.tools.elements import ElementGrammar
from sylvan.text.tools.named import NamedGrammar
from sylvan.text.tools.objects import ObjectGrammar
from sylvan.text.tools.parser import ToolCallSyntax
from sylvan.text.tools.pythonic import GemmaGrammar, PythonicGrammar
from sylvan.text.tools.structural import Wrapping
from sylvan.text.tools.tagged import TagWrapping, tag_wrappings
from sylvan.text.tools.tags import PairGrammar, TagGrammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """How a model family calls functions.

    Attributes:
        name: Option name.
        grammar: How calls are written.
        wrapping: Text around the JSON arguments of a call, for constrained calling; None if
          arguments are not JSON.
        tagged: Format of calls with tagged arguments, if known.
        call_id: Format of call ids, with `{name}` and `{index}`; None for random ids.
    """

    name: str
    grammar: ToolCallSyntax
    wrapping: Wrapping | None = None
    tagged: TagWrapping | None = None
    call_id: str | None = None


_SEP = "\uff5c"  # the full-width bar of DeepSeek's and StepFun's tokens
_SPACE = "\u2581"  # their lower block


def _deepseek(words: str) -> str:
    return f"<{_SEP}{words.replace(' ', _SPACE)}{_SEP}>"


def _dsml(name: str, section: str, gap: str = "") -> TagGrammar:
    tag = f"{_SEP}{name}{_SEP}{gap}"
    return TagGrammar(
        wrappers=(f"<{tag}{section}>",),
        open=f"<{tag}invoke",
        close=f"</{tag}invoke>",
        param_open=f"<{tag}parameter",
        param_close=f"</{tag}parameter>",
        closers=(f"</{tag}{section}>",),
        kinds="string",
    )


def _invoke(*wrappers: str, prefix: str = "", **options: object) -> TagGrammar:
    grammar = TagGrammar(
        wrappers=wrappers,
        open=f"<{prefix}invoke",
        close=f"</{prefix}invoke>",
        param_open=f"<{prefix}parameter",
        param_close=f"</{prefix}parameter>",
        closers=tuple(w.replace("<", "</", 1) for w in wrappers),
        trims=True,
    )
    return replace(grammar, **options)


_QWEN = ObjectGrammar(opens=("<tool_call>",), closers=("</tool_call>",))
_QWEN_TEXT = Wrapping(
    '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "<tool_call>"
)
_QWEN_XML = TagGrammar(
    wrappers=("<tool_call>",),
    open="<function",
    close="</function>",
    param_open="<parameter",
    param_close="</parameter>",
    closers=("</tool_call>",),
    trims=True,
)
_GLM = PairGrammar()
_LLAMA = ObjectGrammar(opens=("<|python_tag|>",), closers=("<|eom_id|>", "<|eot_id|>"), bare=("{",))
_DEEPSEEK_MARKS = {
    "wrappers": (_deepseek("tool calls begin"),),
    "opens": (_deepseek("tool call begin"),),
    "closers": ("```", _deepseek("tool call end"), _deepseek("tool calls end")),
}
_DEEPSEEK_NAME = re.compile(rf"{_deepseek('tool call begin')}\s*([^\s<]+)")
_KIMI_CALL = "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"
_PYTHON_LIST = PythonicGrammar(
    wrappers=("<|python_start|>", "<|python_tag|>"), closers=("<|python_end|>",)
)


def _families() -> Mapping[str, ToolFamily]:
    found: dict[str, ToolFamily] = {}

    def add(names: str, grammar: ToolCallSyntax, wrapping: Wrapping | None = None) -> None:
        for name in names.split():
            found[name] = ToolFamily(name=name, grammar=grammar, wrapping=wrapping)

    add("qwen qwen25 hermes", _QWEN, _QWEN_TEXT)
    add("trinity", replace(_QWEN, hides=("<think>", "</think>")), _QWEN_TEXT)
    add("llama3", _LLAMA, Wrapping('{"name": "NAME", "parameters": ', "}", '{"name": "'))
    add("json_array", ObjectGrammar(bare=("[", "{")))
    _add_named(add)
    _add_tagged(add)
    add("pythonic llama4", _PYTHON_LIST)
    add("gemma4", GemmaGrammar())
    add(
        "lfm2",
        PythonicGrammar(
            wrappers=("<|tool_call_start|>",),
            closers=("<|tool_call_end|>",),
            is_bare=False,
            objects=ObjectGrammar(),
        ),
    )
    add(
        "interns1",
        ObjectGrammar(
            opens=("<|action_start|>",), inner=("<|plugin|>",), closers=("<|action_end|>",)
        ),
        Wrapping(
            '<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ',
            "}<|action_end|>",
            "<|action_start|>",
        ),
    )
    add(
        "cohere_command4",
        ObjectGrammar(
            opens=("<|START_ACTION|>",),
            closers=("<|END_ACTION|>",),
            silent=("<|START_TEXT|>", "<|END_TEXT|>"),
        ),
    )
    add(
        "apertus2509",
        ObjectGrammar(opens=("<|tools_prefix|>",), closers=("<|tools_suffix|>",), keyed=True),
        Wrapping('<|tools_prefix|>[{"NAME": ', "}]<|tools_suffix|>", "<|tools_prefix|>"),
    )
    add(
        "gigachat3",
        ObjectGrammar(
            opens=("function call<|role_sep|>", "<|function_call|>"), silent=("<|message_sep|>",)
        ),
    )
    for names, tagged in tag_wrappings():
        for name in names.split():
            found[name] = replace(found[name], tagged=tagged)
    for name, form in (("kimi_k2", "functions.{name}:{index}"), ("kimi_k3", "{name}:{index}")):
        found[name] = replace(found[name], call_id=form)
    return found


def _add_named(add) -> None:  # noqa: ANN001 - the local function of `_families`
    begin, sep, end = (_deepseek(f"tool {x}") for x in ("call begin", "sep", "call end"))
    add(
        "deepseekv3",
        NamedGrammar(
            **_DEEPSEEK_MARKS,
            head_ends=("```json", "{"),
            name=re.compile(rf"{_deepseek('tool sep')}\s*([^\s`]+)"),
        ),
        Wrapping(f"{begin}function{sep}NAME\n```json\n", f"\n```{end}", begin),
    )
    add(
        "deepseekv31",
        NamedGrammar(**_DEEPSEEK_MARKS, head_ends=(sep,), name=_DEEPSEEK_NAME),
        Wrapping(f"{begin}NAME{sep}", end, begin),
    )
    add(
        "kimi_k2",
        NamedGrammar(
            wrappers=("<|tool_calls_section_begin|>",),
            opens=("<|tool_call_begin|>",),
            head_ends=("<|tool_call_argument_begin|>",),
            name=re.compile(r">\s*(?:functions\.)?([^\s:]+?)(?::\d+)?\s*\Z"),
            closers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            numbered=True,
            drops_strays=True,
        ),
        Wrapping(_KIMI_CALL, "<|tool_call_end|>", "<|tool_call_begin|>"),
    )
    add(
        "mistral",
        NamedGrammar(
            opens=("[TOOL_CALLS]",),
            head_ends=("[ARGS]", "{"),
            name=re.compile(r"\]\s*([^\s\[{]+)(?:\[CALL_ID\]\S*)?\s*\Z"),
            listed=ObjectGrammar(),
        ),
        Wrapping("[TOOL_CALLS]NAME[ARGS]", "", "[TOOL_CALLS]"),
    )
    add(
        "gpt-oss",
        NamedGrammar(
            opens=(
                "<|start|>assistant<|channel|>commentary",
                "<|start|>assistant<|channel|>analysis to=",
                "<|start|>assistant to=",
                "<|channel|>commentary",
                "<|channel|>analysis to=",
                "commentary<|channel|>commentary",  # a filler that follows calls
            ),
            head_ends=("<|message|>",),
            name=re.compile(r"to=functions\.([^\s<]+)"),
            closers=("<|call|>", "<|end|>"),
        ),
        Wrapping(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
            "<|call|>",
            "<|channel|>commentary to=functions.",
        ),
    )
    add(
        "inkling",
        NamedGrammar(
            opens=("<|message_model|>",),
            head_ends=("<|content_invoke_tool_json|>",),
            name=re.compile(r">\s*([^\s<]+)\s*\Z"),
            closers=("<|end_message|>",),
            whole=True,
        ),
    )


def _add_tagged(add) -> None:  # noqa: ANN001 - the local function of `_families`
    add("qwen3_coder step3p5 nanbeige mimo", _QWEN_XML)
    add("glm glm45 glm47 ling3 poolside_v1 spark25", _GLM)
    add("iquest_q1", replace(_GLM, open="<iquest_tool_call>", close="</iquest_tool_call>"))
    add(
        "hunyuan",
        replace(
            _GLM,
            wrappers=("<tool_calls>",),
            separators=("<tool_sep>",),
            closers=("</tool_calls>",),
        ),
    )
    add(
        "k2_horizon",
        PairGrammar(
            wrappers=("<ifm|tool_calls>",),
            open="<ifm|tool_call>",
            key=("<ifm|arg_key>", "</ifm|arg_key>"),
            value=("<ifm|arg_value>", "</ifm|arg_value>"),
            close="</ifm|tool_call>",
            closers=("</ifm|tool_calls>",),
        ),
    )
    add("deepseekv32", _dsml("DSML", "function_calls"))
    add("deepseekv4", _dsml("DSML", "tool_calls"))
    add("deepseekv41", _dsml("DSML", "tool_calls", " "))
    add("gigachat35", _dsml("GCML", "tool_calls"))
    add("minimax-m2", _invoke("<minimax:tool_call>"))
    add("minimax-m3", ElementGrammar(mark="]<]minimax[>["))
    add("dots", _invoke("<dots_function_call>"))
    add(
        "muse",
        _invoke(
            "<atem:function_calls>",
            prefix="atem:",
            closers=("</atem:function_calls>", "<|eot|>"),
        ),
    )
    add(
        "step3",
        _invoke(
            f"<{_SEP}tool_calls_begin{_SEP}>",
            f"<{_SEP}tool_call_begin{_SEP}>",
            f"function<{_SEP}tool_sep{_SEP}>",
            prefix="steptml:",
            closers=(f"<{_SEP}tool_call_end{_SEP}>", f"<{_SEP}tool_calls_end{_SEP}>"),
        ),
    )
    add(
        "minicpm5",
        TagGrammar(
            open="<function",
            close="</function>",
            param_open="<param",
            param_close="</param>",
            trims=True,
            quotes=("<![CDATA[", "]]>"),
        ),
    )
    add(
        "kimi_k3",
        TagGrammar(
            wrappers=("<|open|>tools<|sep|>",),
            open="<|open|>call",
            close="<|close|>call<|sep|>",
            param_open="<|open|>argument",
            param_close="<|close|>argument<|sep|>",
            head_end="<|sep|>",
            closers=("<|close|>tools<|sep|>",),
            names=("tool", "key", "name"),
            kinds="type",
        ),
    )


_FAMILIES = _families()
# formats that a checkpoint's own chat template defines
_FROM_TEMPLATE = ("beam", "response_template")

# substrings of a chat template that identify the family; the first match decides
_SIGNS = (
    ("]<]minimax[>[", "minimax-m3"),
    ("<|channel|>commentary", "gpt-oss"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|open|>call", "kimi_k3"),
    (f"{_SEP}GCML{_SEP}", "gigachat35"),
    (f"<{_SEP}DSML{_SEP} tool_calls", "deepseekv41"),
    (f"<{_SEP}DSML{_SEP}tool_calls", "deepseekv4"),
    (f"{_SEP}DSML{_SEP}", "deepseekv32"),
    ("steptml:", "step3"),
    ("```json", "deepseekv3"),
    (_deepseek("tool sep"), "deepseekv31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<ifm|tool_call>", "k2_horizon"),
    ("<iquest_tool_call>", "iquest_q1"),
    ("<tool_sep>", "hunyuan"),
    ("<arg_key>", "glm"),
    ("<atem:", "muse"),
    ("<minimax:tool_call>", "minimax-m2"),
    ("<dots_function_call>", "dots"),
    ("<function=", "qwen3_coder"),
    ("<param name=", "minicpm5"),
    ("<|tool_call>", "gemma4"),
    ("<|tools_prefix|>", "apertus2509"),
    ("<|START_ACTION|>", "cohere_command4"),
    ("<|action_start|>", "interns1"),
    ("<|content_invoke_tool_json|>", "inkling"),
    ("<|tool_call_start|>", "lfm2"),
    ("function call<|role_sep|>", "gigachat3"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("<tool_call>", "qwen"),
)
_ARCHITECTURES = (
    ("Llama4", "pythonic"),
    ("Llama", "llama3"),
    ("DeepseekV3", "deepseekv3"),
    ("DeepseekV32", "deepseekv32"),
    ("GptOss", "gpt-oss"),
    ("Mistral", "mistral"),
    ("Qwen", "qwen"),
    ("Glm4Moe", "glm"),
)


def options() -> tuple[str, ...]:
    """Every name that `family` accepts."""
    return tuple(sorted((*(set(_FAMILIES) - {"json_array"}), *_FROM_TEMPLATE, "auto")))


def family(name: str, *, chat_template: str = "", architecture: str = "") -> ToolFamily | None:
    """Look up a family; None if `auto` finds no match.

    "json_array" is the form that `tool_choice` "required" asks for.

    Raises:
        ConfigError: There is no such family.
    """
    if name == "auto":
        return choose(chat_template, architecture)
    if name in _FROM_TEMPLATE:
        found = choose(chat_template, architecture)
        if found is None:
            raise ConfigError(f"Tool-call parser {name!r} needs a chat template with markers.")
        return replace(found, name=name)
    if name not in _FAMILIES:
        near = difflib.get_close_matches(name, options(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"There is no tool-call parser {name!r}.{hint}")
    return _FAMILIES[name]


def choose(chat_template: str, architecture: str = "") -> ToolFamily | None:
    """The family whose markers the chat template contains, else the architecture's, or None.

    Models whose template does not mention tools cannot call them.
    """
    if "tool" not in chat_template:
        return None
    name = next((name for sign, name in _SIGNS if sign in chat_template), None)
    if name is None:
        known = (family for sign, family in _ARCHITECTURES if architecture.startswith(sign))
        name = next(known, None)
    return _FAMILIES[name] if name else None
