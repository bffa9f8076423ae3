from __future__ import annotations

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.text.reasoning import choose, family, make_parser, options, separate

CONTRACT = [
    "deepseek-r1",
    "step3",
    "step3p5",
    "gigachat35",
    "qwen3-thinking",
    "minimax",
    "qwen3",
    "dots",
    "nanbeige",
    "interns1",
    "deepseek-v3",
    "deepseek-v4",
    "deepseek-v41",
    "glm45",
    "ling3",
    "mimo",
    "poolside_v1",
    "nemotron_3",
    "granite_thinking_parser",
    "iquest_q1",
    "kimi_k2",
    "minimax-append-think",
    "minimax-m3",
    "kimi",
    "kimi_k3",
    "k2_horizon",
    "gpt-oss",
    "mistral",
    "hunyuan",
    "gemma4",
    "inkling",
    "apertus2509",
    "cohere_command4",
    "muse",
    "beam",
    "response_template",
    "auto",
]
ODD = {"muse", "auto", "minimax-append-think", "gpt-oss"}


def test_every_name_of_the_contract_is_there() -> None:
    assert set(options()) == set(CONTRACT)


@pytest.mark.parametrize("name", sorted(set(CONTRACT) - ODD))
def test_markers_split_thinking_from_answer(name: str) -> None:
    found = family(name, chat_template="<think>")

    text = f"{found.starts[0]}\nwhy \u4f60\n{found.ends[0]}\n\nanswer\n"

    assert separate(text, found, start_in_reasoning=False) == ("why \u4f60", "answer\n")
    assert separate(text, found, start_in_reasoning=True) == ("why \u4f60", "answer\n")
    later = text.removeprefix(found.starts[0])
    assert separate(later, found, start_in_reasoning=True) == ("why \u4f60", "answer\n")
    assert separate(" plain text", found, start_in_reasoning=False) == ("", " plain text")
    assert separate("cut off", found, start_in_reasoning=True) == ("cut off", "")


@pytest.mark.parametrize(
    ("name", "marker"),
    [
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("hunyuan", "<tool_calls>"),
        # tool_start_token of SGLang's reasoning_parser.py
        *((name, "<tool_call>") for name in ("qwen3", "qwen3-thinking", "deepseek-v3", "glm45")),
        *((name, "<tool_call>") for name in ("ling3", "nemotron_3", "mimo", "poolside_v1")),
        *((name, "<tool_call>") for name in ("nanbeige", "granite_thinking_parser", "interns1")),
        ("k2_horizon", "<ifm|tool_calls>"),
        ("k2_horizon", "<ifm|tool_call>"),
        ("kimi_k3", "<|open|>tools<|sep|>"),
    ],
)
def test_tool_section_ends_thinking_and_stays(name: str, marker: str) -> None:
    text = f"hm\n{marker}call"

    assert separate(text, family(name), start_in_reasoning=True) == ("hm", f"{marker}call")


def pieces(name: str, text: str, *, inside: bool, step: int) -> tuple[str, str]:
    parser = make_parser(family(name), start_in_reasoning=inside)
    deltas = [parser.feed(text[at : at + step]) for at in range(0, len(text), step)]
    deltas.append(parser.finish())
    return "".join(d[0] for d in deltas), "".join(d[1] for d in deltas)


@pytest.mark.parametrize("step", [1, 5, 999])
@pytest.mark.parametrize(
    ("name", "text", "inside", "want"),
    [
        # the forms that CohereCommand4Detector of SGLang's reasoning_parser.py documents
        (
            "cohere_command4",
            "why<|END_THINKING|><|START_TEXT|>answer<|END_TEXT|>",
            True,
            ("why", "answer"),
        ),
        ("cohere_command4", "<|START_TEXT|>answer<|END_TEXT|>", False, ("", "answer")),
        (
            "cohere_command4",
            "why<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|>",
            True,
            ("why", "<|START_ACTION|>[]<|END_ACTION|>"),
        ),
        ("cohere_command4", "a<|START_TE", False, ("", "a<|START_TE")),
        # MiniMaxM3Detector there: a turn without thinking may open with a stray closer
        ("minimax-m3", "</mm:think>answer", False, ("", "answer")),
        ("minimax-m3", "\n</mm:think>\n\nanswer", False, ("", "answer")),
        ("minimax-m3", "a</mm:think>b", False, ("", "a</mm:think>b")),
        ("minimax-m3", "why</mm:think>answer", True, ("why", "answer")),
        # Apertus2509Detector there: blocks may follow text, and calls stand inside of them
        (
            "apertus2509",
            "Hi. <|inner_prefix|>one<|inner_suffix|>So: <|inner_prefix|>two<|inner_suffix|>done",
            False,
            ("onetwo", "Hi. So: done"),
        ),
        (
            "apertus2509",
            '<|inner_prefix|>hm <|tools_prefix|>[{"now": {}}]<|tools_suffix|>'
            " more<|inner_suffix|>a",
            False,
            ("hmmore", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>a'),
        ),
        ("apertus2509", "cut off", True, ("cut off", "")),
    ],
)
def test_marks_around_answers_and_blocks_are_left_out(
    name: str, text: str, inside: bool, want: tuple[str, str], step: int
) -> None:
    assert pieces(name, text, inside=inside, step=step) == want


def test_append_think_keeps_everything() -> None:
    found = family("minimax-append-think")

    assert separate("a</think>b", found, start_in_reasoning=True) == ("", "<think>a</think>b")


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>let me see<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look. <|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        "<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>done<|return|>"
    )

    reasoning, content = separate(text, family("gpt-oss"), start_in_reasoning=True)

    assert reasoning == "let me see"
    assert content == (
        "I will look. <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        "<|message|>{}<|call|>done"
    )


@pytest.mark.parametrize("step", [1, 7, 999])
@pytest.mark.parametrize(
    ("after", "want"),
    [
        ("commentary<|channel|>final<|message|>done<|return|>", "done"),
        ("commentary", "commentary"),
        ("commentaries", "commentaries"),
    ],
)
def test_harmony_drops_the_filler_after_a_call(after: str, want: str, step: int) -> None:
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"

    assert pieces("gpt-oss", call + after, inside=False, step=step) == ("", call + want)


def test_harmony_passes_plain_and_truncated_text() -> None:
    found = family("gpt-oss")

    assert separate("plain", found, start_in_reasoning=False) == ("", "plain")
    cut = "<|channel|>analysis<|message|>half"
    assert separate(cut, found, start_in_reasoning=False) == ("half", "")


def test_muse_channels() -> None:
    call = '<atem:function_calls><atem:invoke name="f"></atem:invoke></atem:function_calls>'
    text = (
        " to=self<|message|>let me see<|eom|>"
        f"<|start|>assistant to=f<|message|>{call}<|eom|>"
        "<|start|>assistant to=user<|message|>done<|eot|>"
    )

    assert separate(text, family("muse"), start_in_reasoning=False) == ("let me see", f"{call}done")


@pytest.mark.parametrize(
    ("text", "inside", "want"),
    [
        ("plain", False, ("", "plain")),
        (" to", False, ("", " to")),
        (" to=self<|message|>half", False, ("half", "")),
        ("half<|eom|><|start|>assistant to=user<|message|>done", True, ("half", "done")),
        (" to=user<|message|>done", False, ("", "done")),
    ],
)
def test_muse_passes_plain_and_truncated_text(text: str, inside: bool, want: tuple) -> None:
    assert separate(text, family("muse"), start_in_reasoning=inside) == want


@pytest.mark.parametrize(
    ("name", "prompt", "kwargs", "want"),
    [
        ("deepseek-r1", "", {}, True),
        ("deepseek-r1", "<think>\n\n</think>\n\n", {}, False),
        ("qwen3", "", {}, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", {}, True),
        ("deepseek-v3", "", {}, False),
        ("deepseek-v3", "", {"thinking": True}, True),
        ("nemotron_3", "", {"enable_thinking": False}, False),
        ("minimax-m3", "", {"thinking_mode": "enabled"}, True),
    ],
)
def test_start_in_reasoning(name: str, prompt: str, kwargs: dict, want: bool) -> None:
    assert family(name).starts_in_reasoning(prompt, kwargs) is want


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ messages }}", None),
        ("... '</think>' ... enable_thinking", "qwen3"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss"),
        ("[THINK]", "mistral"),
        ("<think> <arg_key>", "glm45"),
        ("<|tool_calls_section_begin|> </think>", "kimi_k2"),
    ],
)
def test_auto_reads_the_template(template: str, want: str | None) -> None:
    found = choose(template)

    assert (found and found.name) == want
    assert family("auto", chat_template=template) == found


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'qwen3'"):
        family("qwen")
    with pytest.raises(ConfigError, match="needs a chat template"):
        family("beam")


@pytest.mark.parametrize(
    ("name", "prompt", "kwargs", "want"),
    [
        ("qwen3", "<|im_start|>assistant\n", {}, True),
        ("qwen3", "<think>\n\n</think>\n\n", {}, False),
        ("qwen3", "", {"enable_thinking": True}, True),
        ("qwen3", "", {"enable_thinking": False}, False),
        ("glm45", "", {"thinking": "disabled"}, False),
        ("gpt-oss", "<|start|>assistant", {"reasoning_effort": "low"}, True),
        ("mistral", "", {"reasoning_effort": "none"}, False),
        ("deepseek-v3", "", {}, False),
        ("deepseek-v3", "", {"thinking": True}, True),
        ("minimax-m3", "", {}, True),
        ("minimax-m3", "", {"thinking_mode": "disabled"}, False),
    ],
)
def test_whether_a_model_may_open_its_thinking(
    name: str, prompt: str, kwargs: dict, want: bool
) -> None:
    assert family(name).may_start_reasoning(prompt, kwargs) is want
