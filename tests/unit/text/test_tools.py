from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.features.grammar.libraries import installed_backends
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError
from sylvan.text.tools import (
    ArgumentsDelta,
    CallStart,
    ParsedTools,
    TextDelta,
    ToolParser,
    ToolSpec,
    calls_schema,
    choose,
    family,
    is_complete,
    options,
    parse,
    structural_tags,
)
from tests.support.grammar import accept, make_backend

CONTRACT = [
    "llama3",
    "qwen",
    "qwen25",
    "hermes",
    "trinity",
    "mistral",
    "pythonic",
    "lfm2",
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "deepseekv4",
    "deepseekv41",
    "glm",
    "glm45",
    "glm47",
    "ling3",
    "poolside_v1",
    "iquest_q1",
    "k2_horizon",
    "hunyuan",
    "kimi_k2",
    "kimi_k3",
    "qwen3_coder",
    "step3p5",
    "nanbeige",
    "mimo",
    "spark25",
    "minicpm5",
    "dots",
    "minimax-m2",
    "minimax-m3",
    "step3",
    "gpt-oss",
    "interns1",
    "gigachat3",
    "gigachat35",
    "gemma4",
    "apertus2509",
    "cohere_command4",
    "inkling",
    "muse",
    "beam",
    "response_template",
    "auto",
]
TOOLS = ToolSpec.from_openai(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "units": {"type": ["string", "null"]},
                        "where": {"type": "object"},
                    },
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)
ARGS = {"city": 'Z\u00fcrich "west" <\u4f60>', "days": 3, "where": {"a": [1, {"b": None}]}}
WHERE = json.dumps(ARGS["where"])
TEXT = json.dumps(ARGS, ensure_ascii=False)
OBJECT = '{"name": "get_weather", "arguments": ' + TEXT + "}"
NOW = '{"name": "now", "arguments": {}}'
DS = {
    "b": "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "e": "<\uff5ctool\u2581call\u2581end\uff5c>",
    "s": "<\uff5ctool\u2581sep\uff5c>",
    "B": "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "E": "<\uff5ctool\u2581calls\u2581end\uff5c>",
}


def invoke(begin: str, end: str, *, prefix: str = "", line: str = "\n") -> str:
    return (
        f'{begin}\n<{prefix}invoke name="get_weather">\n'
        f'<{prefix}parameter name="city">{line}{ARGS["city"]}{line}</{prefix}parameter>\n'
        f'<{prefix}parameter name="days">3</{prefix}parameter>\n'
        f'<{prefix}parameter name="where">{WHERE}</{prefix}parameter>\n</{prefix}invoke>\n'
        f'<{prefix}invoke name="now">\n</{prefix}invoke>\n{end}'
    )


def dsml(tag: str, section: str) -> str:
    def parameter(key: str, value: object, text: str) -> str:
        return f'<{tag}parameter name="{key}" string="{text}">{value}</{tag}parameter>\n'

    return (
        f'<{tag}{section}>\n<{tag}invoke name="get_weather">\n'
        + parameter("city", ARGS["city"], "true")
        + parameter("days", 3, "false")
        + parameter("where", WHERE, "false")
        + f'</{tag}invoke>\n<{tag}invoke name="now">\n</{tag}invoke>\n</{tag}{section}>'
    )


def pairs(opening: str, closing: str, *, tag: str = "", sep: str = "\n") -> str:
    def pair(key: str, value: object) -> str:
        return (
            f"<{tag}arg_key>{key}</{tag}arg_key>{'' if '>' in sep else sep}"
            f"<{tag}arg_value>{value}</{tag}arg_value>\n"
        )

    body = pair("city", ARGS["city"]) + pair("days", 3) + pair("where", WHERE)
    return f"{opening}get_weather{sep}{body}{closing}{opening}now{sep}{closing}"


MM = "]<]minimax[>["
# an element for each parameter, and inside for each key and item: test_minimax_m3_tool_parser.py
# of vLLM and minimax_m3.py of SGLang
ELEMENTS = (
    f'{MM}<tool_call>\n{MM}<invoke name="get_weather">{MM}<city>{ARGS["city"]}{MM}</city>'
    f"{MM}<days>3{MM}</days>{MM}<where>{MM}<a>{MM}<item>1{MM}</item>"
    f"{MM}<item>{MM}<b>null{MM}</b>{MM}</item>{MM}</a>{MM}</where>{MM}</invoke>\n"
    f'{MM}<invoke name="now">{MM}</invoke>\n{MM}</tool_call>'
)
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n" + ARGS["city"] + "\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=where>\n" + WHERE + "\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
QWEN = f"<tool_call>\n{OBJECT}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>"
GLM = pairs("<tool_call>", "</tool_call>")
PYTHON = f"[get_weather(city={ARGS['city']!r}, days=3, where={ARGS['where']!r}), now()]"
HARMONY = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS<|call|>"
KIMI = "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>"
DSML, GCML = "\uff5cDSML\uff5c", "\uff5cGCML\uff5c"


def both(form: str) -> str:
    first = form.replace("NAME", "get_weather").replace("ARGS", TEXT)
    return first + form.replace("NAME", "now").replace("ARGS", "{}")


SAMPLES = {
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": ' + TEXT + "}; " + NOW,
    "qwen": QWEN,
    "qwen25": QWEN,
    "hermes": QWEN.replace("\n", ""),
    "trinity": QWEN,
    "mistral": both("[TOOL_CALLS]NAME[@]ARGS").replace("@", "ARGS"),
    "pythonic": PYTHON,
    "llama4": f"<|python_start|>{PYTHON}<|python_end|>",
    "lfm2": f"<|tool_call_start|>{PYTHON}<|tool_call_end|>",
    "deepseekv3": DS["B"]
    + both(f"{DS['b']}function{DS['s']}NAME\n```json\nARGS\n```{DS['e']}\n")
    + DS["E"],
    "deepseekv31": DS["B"] + both(f"{DS['b']}NAME{DS['s']}ARGS{DS['e']}") + DS["E"],
    "deepseekv32": dsml(DSML, "function_calls"),
    "deepseekv4": dsml(DSML, "tool_calls"),
    "deepseekv41": dsml(DSML + " ", "tool_calls"),
    "gigachat35": dsml(GCML, "tool_calls"),
    "glm": GLM,
    "glm45": GLM,
    "glm47": GLM.replace("\n", ""),
    "ling3": GLM,
    "poolside_v1": GLM,
    "iquest_q1": GLM.replace("tool_call>", "iquest_tool_call>"),
    "hunyuan": "<tool_calls>\n"
    + pairs("<tool_call>", "</tool_call>\n", sep="<tool_sep>")
    + "</tool_calls>",
    "k2_horizon": "<ifm|tool_calls>\n"
    + pairs("<ifm|tool_call>", "</ifm|tool_call>\n", tag="ifm|")
    + "</ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>" + both(KIMI) + "<|tool_calls_section_end|>",
    "kimi_k3": "<|open|>tools<|sep|>"
    '<|open|>call tool="get_weather" index="0"<|sep|>'
    f'<|open|>argument key="city" type="string"<|sep|>{ARGS["city"]}<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    f'<|open|>argument key="where" type="object"<|sep|>{WHERE}<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "qwen3_coder": XML,
    "step3p5": XML,
    "nanbeige": XML,
    "mimo": XML,
    # one line for the name, then pairs: spark25_detector.py of SGLang
    "spark25": "<tool_call>get_weather\n"
    f"<arg_key>city</arg_key><arg_value>{ARGS['city']}</arg_value>"
    f"<arg_key>days</arg_key><arg_value>3</arg_value>"
    f"<arg_key>where</arg_key><arg_value>{WHERE}</arg_value></tool_call>"
    "<tool_call>now</tool_call>",
    "minicpm5": f'<function name="get_weather"><param name="city">{ARGS["city"]}</param>'
    f'<param name="days">3</param><param name="where">{WHERE}</param></function>'
    '<function name="now"></function>',
    "dots": invoke("<dots_function_call>", "</dots_function_call>"),
    "minimax-m2": invoke("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax-m3": ELEMENTS,
    "step3": invoke(
        "<\uff5ctool_calls_begin\uff5c><\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>",
        "<\uff5ctool_call_end\uff5c><\uff5ctool_calls_end\uff5c>",
        prefix="steptml:",
    ),
    "muse": invoke("<atem:function_calls>", "</atem:function_calls>", prefix="atem:"),
    "gpt-oss": HARMONY.replace("NAME", "get_weather").replace("ARGS", TEXT)
    + "<|start|>assistant"
    + HARMONY.replace("NAME", "now").replace("ARGS", "{}"),
    "interns1": f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|>"
    f"<|action_start|><|plugin|>{NOW}<|action_end|>",
    "gigachat3": f"function call<|role_sep|>\n{OBJECT}\nfunction call<|role_sep|>\n{NOW}",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>' + ARGS["city"] + '<|"|>,days:3,'
    "where:{a:[1,{b:null}]}}<tool_call|><|tool_call>call:now{}<tool_call|>",
    "apertus2509": '<|tools_prefix|>[{"get_weather": ' + TEXT + '}, {"now": {}}]<|tools_suffix|>',
    "cohere_command4": "<|START_ACTION|>[\n"
    '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + TEXT + "},\n"
    '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "inkling": f"<|message_model|>get_weather<|content_invoke_tool_json|>{OBJECT}<|end_message|>"
    '<|message_model|>now<|content_invoke_tool_json|>{"args": {}}<|end_message|>',
}
NAMES = sorted(SAMPLES)
# a list of Python calls, or keyed objects, is text from its first unknown function on
FIRST_DECIDES = {"pythonic", "llama4", "lfm2", "apertus2509"}


def run(name: str, text: str, tools=TOOLS):
    return parse(text, family(name).grammar, tools)


def test_every_name_of_the_contract_is_there() -> None:
    assert set(options()) == set(CONTRACT) | {"llama4"}
    assert set(SAMPLES) | {"beam", "response_template", "auto"} == set(options())


@pytest.mark.parametrize("name", NAMES)
def test_two_parallel_calls_are_found(name: str) -> None:
    result = run(name, "Let me see.\n\n" + SAMPLES[name])

    assert [call.name for call in result.calls] == ["get_weather", "now"]
    assert [json.loads(call.arguments) for call in result.calls] == [ARGS, {}]
    assert result.text == "Let me see."


@pytest.mark.parametrize("name", NAMES)
def test_token_sized_pieces_give_the_same_events(name: str) -> None:
    for size in (1, 2, 3, 7):
        parser = ToolParser(family(name).grammar, TOOLS)
        text = SAMPLES[name]
        events = [e for i in range(0, len(text), size) for e in parser.feed(text[i : i + size])]
        events += parser.finish()
        assert [e for e in events if isinstance(e, CallStart)] == [
            CallStart(0, "get_weather"),
            CallStart(1, "now"),
        ]
        joined = "".join(
            e.fragment for e in events if isinstance(e, ArgumentsDelta) and not e.index
        )
        assert json.loads(joined) == ARGS
        assert not [e for e in events if isinstance(e, TextDelta)]


@pytest.mark.parametrize("name", NAMES)
def test_unknown_functions_stay_text(name: str) -> None:
    text = SAMPLES[name].replace("get_weather", "rm_rf").replace("now", "later")

    result = run(name, text)

    assert (result.text, result.calls) == (text, [])
    names = [call.name for call in run(name, text, None).calls]
    assert names == ["rm_rf", "later"]


@pytest.mark.parametrize("name", NAMES)
def test_known_call_after_an_unknown_one_is_found(name: str) -> None:
    result = run(name, SAMPLES[name].replace("get_weather", "rm_rf"))

    assert [call.name for call in result.calls] == ([] if name in FIRST_DECIDES else ["now"])
    assert "rm_rf" in result.text


@pytest.mark.parametrize("name", NAMES)
def test_truncated_output_never_loses_a_complete_call(name: str) -> None:
    text = SAMPLES[name]
    for end in range(len(text)):
        result = run(name, text[:end])
        if not result.calls:
            assert result.text == text[:end]
        elif len(result.calls) == 2:
            assert json.loads(result.calls[0].arguments) == ARGS
        else:
            assert result.calls[0].name == "get_weather"
            assert is_complete(result.calls[0]) or result.calls[0].arguments.startswith(
                TEXT[: len(result.calls[0].arguments) // 2]
            )


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_passes_unchanged(name: str) -> None:
    for text in ("", "Hello\n", "  a < b [1, 2] {x} ", "f(x) = [a(1)]", "{not json", "\n"):
        result = run(name, text)
        assert (result.text, result.calls) == (text, [])


def test_text_streams_at_once_and_arguments_as_they_come() -> None:
    parser = ToolParser(family("qwen").grammar, TOOLS)

    assert parser.feed("Hi there") == [TextDelta("Hi there")]
    assert parser.feed(" <tool") == []
    assert parser.feed('_call>{"name": "get_weather", "arguments": {"city": "Pa') == [
        CallStart(0, "get_weather"),
        ArgumentsDelta(0, '{"city": "Pa'),
    ]
    assert parser.feed("ris") == [ArgumentsDelta(0, "ris")]
    assert parser.feed('"}}</tool_call>') == [ArgumentsDelta(0, '"}')]
    assert parser.finish() == []


def test_string_parameters_of_tags_stream_too() -> None:
    parser = ToolParser(family("qwen3_coder").grammar, TOOLS)
    parser.feed("<tool_call><function=get_weather><parameter=city>\n")

    assert parser.feed('a "b"\n') == [ArgumentsDelta(0, 'a \\"b\\"')]
    assert parser.feed("c") == [ArgumentsDelta(0, "\\nc")]


@pytest.mark.parametrize(
    ("value", "schema", "want"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("3.0", {"type": "integer"}, 3),
        ("1e3", {"type": "number"}, 1000.0),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("12", {"type": ["string", "null"]}, "12"),
        ("{'a': [1, True, None]}", {"type": "object"}, {"a": [1, True, None]}),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[1]", {"anyOf": [{"type": "array"}, {"type": "null"}]}, [1]),
        ("five", {"type": "integer"}, "five"),
        ("2", {"enum": [1, 2]}, 2),
        ("x", {}, "x"),
        ("7", {}, 7),
        ("nan", {"type": "number"}, "nan"),
        ("null", {"type": "integer"}, None),
        ("None", {"type": "object"}, None),
        ("007", {"type": "integer"}, 7),
        ("007", {"type": ["string", "integer"]}, "007"),
        ("NaN", {}, "NaN"),
    ],
)
def test_values_are_converted_by_the_schema(value: str, schema: dict, want: object) -> None:
    tools = [ToolSpec("f", {"type": "object", "properties": {"x": schema}})]
    text = f"<tool_call><function=f><parameter=x>{value}</parameter></function></tool_call>"

    (call,) = run("qwen3_coder", text, tools).calls

    assert json.loads(call.arguments) == {"x": want}
    assert type(json.loads(call.arguments)["x"]) is type(want)


def test_bare_json_is_a_call_at_the_start_only() -> None:
    assert run("llama3", " " + OBJECT).calls
    assert not run("llama3", "Look: " + OBJECT).calls
    answer = '{"city": "Paris"}'
    assert run("llama3", answer).text == answer


def test_json_repairs() -> None:
    broken = '{"name": "get_weather", "arguments": {"city": "a\nb\t", "days": None}}'

    (call,) = run("qwen", f"<tool_call>{broken}</tool_call>").calls

    assert json.loads(call.arguments) == {"city": "a\nb\t", "days": None}


def test_other_object_shapes() -> None:
    def one(text: str) -> dict:
        (call,) = run("qwen", f"<tool_call>{text}</tool_call>").calls
        return json.loads(call.arguments)

    assert one('{"arguments": {"days": 1}, "name": "get_weather"}') == {"days": 1}
    assert one('{"name": "get_weather", "arguments": "{\\"days\\": 1}"}') == {"days": 1}
    assert one('{"name": "get_weather"}') == {}
    assert one('{"name": "get_weather", "arguments": null}') == {}
    nested = '{"type": "function", "function": {"name": "get_weather", "arguments": {"days": 2}}}'
    assert one(nested) == {"days": 2}


def test_mistral_list_form() -> None:
    result = run("mistral", f"[TOOL_CALLS] [{OBJECT}, {NOW}]")

    assert [call.name for call in result.calls] == ["get_weather", "now"]


def test_dsml_takes_a_json_body() -> None:
    text = f'<{DSML}function_calls><{DSML}invoke name="get_weather">{TEXT}</{DSML}invoke>'

    (call,) = run("deepseekv32", f"{text}</{DSML}function_calls>").calls

    assert json.loads(call.arguments) == ARGS


ORDER = ToolSpec(
    "create_order",
    {
        "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "string"}}}},
        "type": "object",
        "properties": {
            "user_id": {"type": "integer"},
            "urgent": {"type": "boolean"},
            "note": {"type": "string"},
            "shipping": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
            },
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"sku": {"type": "string"}, "qty": {"type": "integer"}},
                },
            },
            "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
            "duplicate_demo": {"type": "object"},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
        },
    },
)


def test_nested_elements_follow_the_schema() -> None:
    # build_order_call of vLLM's test_minimax_m3_tool_parser.py
    text = (
        f'{MM}<tool_call>\n{MM}<invoke name="create_order">{MM}<user_id>42{MM}</user_id>'
        f"{MM}<urgent>true{MM}</urgent>{MM}<note>Please leave at front desk.{MM}</note>"
        f"{MM}<shipping>{MM}<city>Singapore{MM}</city>{MM}<zip>018956{MM}</zip>{MM}</shipping>"
        f"{MM}<items>{MM}<item>{MM}<sku>book-001{MM}</sku>{MM}<qty>2{MM}</qty>{MM}</item>"
        f"{MM}<item>{MM}<sku>pen-007{MM}</sku>{MM}<qty>5{MM}</qty>{MM}</item>{MM}</items>"
        f"{MM}<metadata>{MM}<source>mobile{MM}</source>{MM}<campaign>may-launch{MM}</campaign>"
        f"{MM}</metadata>{MM}<duplicate_demo>{MM}<tag>a{MM}</tag>{MM}<tag>b{MM}</tag>"
        f"{MM}</duplicate_demo>{MM}</invoke>\n{MM}</tool_call>"
    )

    result = run("minimax-m3", f"I will create it.\n{text}", [ORDER])

    (call,) = result.calls
    assert result.text == "I will create it."
    assert json.loads(call.arguments) == {
        "user_id": 42,
        "urgent": True,
        "note": "Please leave at front desk.",
        "shipping": {"city": "Singapore", "zip": 18956},
        "items": [{"sku": "book-001", "qty": 2}, {"sku": "pen-007", "qty": 5}],
        "metadata": {"source": "mobile", "campaign": "may-launch"},
        "duplicate_demo": {"tag": ["a", "b"]},
    }


@pytest.mark.parametrize(
    ("element", "want"),
    [
        ("<tags>#<item>7#</item>#</tags>", {"tags": ["7"]}),  # one item is a list too
        ("<tags>null#</tags>", {"tags": None}),
        ("<items>#</items>", {"items": []}),
        ("<shipping>#</shipping>", {"shipping": {}}),
        ("<metadata>#<a>5#</a>#</metadata>", {"metadata": {"a": "5"}}),
        ("<place>#<zip>018956#</zip>#</place>", {"place": {"zip": "018956"}}),
        ("<pair>#<item>1#</item>#<item>2#</item>#</pair>", {"pair": ["1", 2]}),
        (
            "<duplicate_demo>#<a>1#</a>#<a>x#</a>#</duplicate_demo>",
            {"duplicate_demo": {"a": [1, "x"]}},
        ),
        ('<duplicate_demo>{"a": 1}#</duplicate_demo>', {"duplicate_demo": {"a": 1}}),
        ("<note> a <b>c</b> #<d> \n# </note>", {"note": " a <b>c</b> #<d> \n"}),
        ("<duplicate_demo>a#<b>c#</duplicate_demo>", {"duplicate_demo": "a#<b>c"}),
        ("<other>#<item>1#</item>#<item>#<b>x#</b>#</item>#</other>", {"other": [1, {"b": "x"}]}),
        ("<user_id>null#</user_id>", {"user_id": None}),
    ],
)
def test_elements_become_what_the_schema_allows(element: str, want: dict[str, Any]) -> None:
    text = f'#<tool_call>#<invoke name="create_order">#{element}#</invoke>#</tool_call>'
    want = json.loads(json.dumps(want).replace("#", MM))

    result = run("minimax-m3", text.replace("#", MM), [ORDER])

    (call,) = result.calls
    assert (json.loads(call.arguments), result.text) == (want, "")


def test_minimax_m3_is_known_by_the_mark_in_its_template() -> None:
    # how its chat_template.jinja composes tags
    template = "{%- set ns_token = ']<]minimax[>[' -%}{%- set begin = ns_token ~ '<tool_call>' -%}"

    assert choose(template + "tools <mm:think>").name == "minimax-m3"


def test_gigachat_ends_messages_without_a_word() -> None:
    # as models/templates/GigaChat3-10B-A1.8B.jinja of llama.cpp renders an assistant's turn
    text = f"Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n{OBJECT}<|message_sep|>\n\n"

    for step in (1, 4, 999):
        parser, result = ToolParser(family("gigachat3").grammar, TOOLS), ParsedTools()
        for at in range(0, len(text), step):
            result.add(parser.feed(text[at : at + step]))
        result.add(parser.finish())
        assert result.text == "Let me see."
        assert [json.loads(call.arguments) for call in result.calls] == [ARGS]
    assert run("gigachat3", "Hello!<|message_sep|>\n\n").text == "Hello!"
    assert run("cohere_command4", "<|START_TEXT|>Hello!<|END_TEXT|>").text == "Hello!"


MALFORMED = {
    # PoolsideV1Detector of SGLang: a key without a value is forgotten
    "orphan": (
        "poolside_v1",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_key>city</arg_key>\n"
        "<arg_value>Ulm</arg_value>\n<arg_key>where</arg_key>\n</tool_call>",
        {"city": "Ulm"},
    ),
    # KimiK2Detector there: a counter instead of a name, and marks that belong to no call
    "counter": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>3<|tool_call_argument_begin|>"
        '{"city": "Ulm"}'
        "<|tool_call_end|><|tool_calls_section_end|><|tool_calls_section_end|>",
        {"city": "Ulm"},
    ),
    # MiniCPM5Detector there: text that may hold tags, and a parameter that comes again
    "quoted": (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[a </param> <b>\nc]]></param>'
        '<param name="days"><![CDATA[3]]></param><param name="days">4</param></function>',
        {"city": "a </param> <b>\nc", "days": 3},
    ),
    # HarmonyParser there: a word between a call and the next message
    "filler": (
        "gpt-oss",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}'
        "<|call|>commentary<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"city": "Ulm"}<|call|>',
        {"city": "Ulm"},
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("step", [1, 6, 999])
def test_odd_calls_are_read_without_a_trace(case: str, step: int) -> None:
    name, text, want = MALFORMED[case]
    parser, result = ToolParser(family(name).grammar, TOOLS), ParsedTools()
    for at in range(0, len(text), step):
        result.add(parser.feed(text[at : at + step]))
    result.add(parser.finish())

    assert [json.loads(call.arguments) for call in result.calls] == [want] * len(result.calls)
    assert {call.name for call in result.calls} == {"get_weather"}
    assert result.text == ""


def test_trinity_ignores_calls_in_thinking() -> None:
    text = f"<think>maybe {QWEN}</think>\n"

    result = run("trinity", text + QWEN)

    assert len(result.calls) == 2
    assert result.text == text.rstrip()


def test_json_array_form() -> None:
    text = '[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {"a": 1}}]'

    result = run("json_array", text)

    assert [call.arguments for call in result.calls] == ["{}", '{"a": 1}']
    assert result.text == ""


def test_hostile_text_is_handled() -> None:
    deep = '{"name": "now", "arguments": ' + '{"a":' * 5000
    nested = '{"function":' * 5000

    for name in NAMES:
        assert run(name, f"<tool_call>{deep}").text
        assert run(name, f"<tool_call>{nested}").text
        assert run(name, "[now(a=" + "[" * 5000).text
    (call,) = run("qwen", '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}').calls
    assert call.arguments.encode()


@pytest.mark.parametrize(
    ("template", "architecture", "want"),
    [
        ("{{ messages }}", "LlamaForCausalLM", None),
        ("tools <tool_call>", "", "qwen"),
        ("tools <tool_call> <function=", "", "qwen3_coder"),
        ("tools <tool_call> <arg_key>", "", "glm"),
        ("tools [TOOL_CALLS]", "", "mistral"),
        ("tools", "LlamaForCausalLM", "llama3"),
        ("tools", "Llama4ForConditionalGeneration", "pythonic"),
        ("tools", "SomethingElse", None),
    ],
)
def test_auto_reads_template_and_architecture(template, architecture, want) -> None:
    found = choose(template, architecture)

    assert (found and found.name) == want
    assert family("auto", chat_template=template, architecture=architecture) == found


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean"):
        family("qwen3")
    with pytest.raises(ConfigError, match="needs a chat template"):
        family("beam")


@pytest.mark.parametrize("name", [n for n in NAMES if family(n).wrapping])
def test_constrained_calls_are_read_by_the_own_parser(name: str) -> None:
    tags = structural_tags(family(name).wrapping, TOOLS, "get_weather")

    (tag,) = tags.tags
    result = run(name, f"{tag.begin}{TEXT}{tag.end}")

    assert tags.at_least_one
    assert tag.begin.startswith(tags.triggers)
    assert tag.schema == TOOLS[0].parameters
    assert [json.loads(call.arguments) for call in result.calls] == [ARGS]
    assert result.text == ""
    assert tags.to_json()["structures"][0]["begin"] == tag.begin


def test_structural_tags_are_absent_for_tagged_families() -> None:
    assert structural_tags(family("glm").wrapping, TOOLS) is None


def test_calls_schema() -> None:
    required = calls_schema(TOOLS)
    named = calls_schema(TOOLS, "now", parallel=False)

    assert len(required["items"]["anyOf"]) == 2
    assert "maxItems" not in required
    assert named["items"]["properties"]["name"] == {"type": "string", "enum": ["now"]}
    assert named["maxItems"] == 1
    with pytest.raises(RequestError, match="not one of the tools"):
        calls_schema(TOOLS, "nope")
    with pytest.raises(RequestError, match="needs tools"):
        calls_schema((), "required")


LEAF = {"type": "string", "enum": ["x"]}
RECURSIVE: dict[str, dict[str, Any]] = {
    "defs": {
        "$defs": {"P": LEAF},
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/P"}},
        "required": ["p"],
        "additionalProperties": False,
    },
    "definitions": {
        "definitions": {"P": {"type": "integer"}},
        "type": "object",
        "properties": {"p": {"$ref": "#/definitions/P"}},
        "required": ["p"],
        "additionalProperties": False,
    },
    "root": {
        "type": "object",
        "properties": {"p": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["p"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"p": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["p"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "place": {
        "type": "object",
        "properties": {"q": LEAF, "p": {"$ref": "#/properties/q"}},
        "required": ["p"],
        "additionalProperties": False,
    },
}
GOOD = {"defs": "x", "definitions": 5, "root": {"p": None}, "tree": [{"p": []}], "place": "x"}
WRONG = {"defs": 5, "definitions": "x", "root": {"p": 1}, "tree": [{"p": 1}], "place": "y"}


@pytest.mark.parametrize("choice", ["required", "tree", "root"])
def test_references_hold_inside_the_schema_of_calls(choice: str) -> None:
    tools = [ToolSpec(name, schema) for name, schema in RECURSIVE.items()]
    validator = importlib.import_module("jsonschema_rs").validator_for(calls_schema(tools, choice))
    chosen = RECURSIVE if choice == "required" else [choice]

    for name in chosen:
        assert validator.is_valid([{"name": name, "parameters": {"p": GOOD[name]}}])
        assert not validator.is_valid([{"name": name, "parameters": {"p": WRONG[name]}}])


@pytest.mark.parametrize("backend", installed_backends())
@pytest.mark.parametrize("name", RECURSIVE)
def test_grammars_of_calls_follow_references(backend: str, name: str) -> None:
    tools = [ToolSpec(name, schema) for name, schema in RECURSIVE.items()]
    text = json.dumps(calls_schema(tools, name))
    library = make_backend(backend)
    try:
        grammar = library.compile(GrammarSpec("json_schema", text))
    except NotSupportedError as error:
        pytest.skip(str(error))

    def takes(value: object) -> bool:
        call = json.dumps([{"name": name, "parameters": {"p": value}}], separators=(",", ":"))
        return accept(grammar.matcher(), call.encode())

    assert takes(GOOD[name])
    assert not takes(WRONG[name])


def test_parameters_that_refer_to_nothing_stay_where_they_are() -> None:
    schema = calls_schema([ToolSpec("f", {"type": "object", "properties": {"$ref": LEAF}})])

    assert "$defs" not in schema
    assert schema["items"]["properties"]["parameters"]["properties"] == {"$ref": LEAF}


def test_values_that_look_like_references_are_left_alone() -> None:
    value = {"$ref": "#/no/place"}
    spec = {"properties": {"p": {"const": value}, "q": {"$ref": "#"}, "r": {"$ref": "other.json"}}}
    [placed] = calls_schema([ToolSpec("f", spec)])["$defs"].values()

    assert placed["properties"]["p"] == {"const": value}
    assert placed["properties"]["q"] == {"$ref": "#/$defs/tool0"}
    assert placed["properties"]["r"] == {"$ref": "other.json"}
