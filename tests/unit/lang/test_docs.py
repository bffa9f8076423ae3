"""The code of the documentation runs, and its lists are complete."""

from __future__ import annotations

import re
from pathlib import Path

import sylvan as sgl
from sylvan.lang.chat_templates import ChatTemplateRegistry
from sylvan.protocol.sampling import SamplingParams

DOCS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_code_of_the_howto_runs(capsys):
    sgl.set_default_backend(sgl.Scripted(lambda text: "4" if "severe" in text else "yes"))
    names: dict = {}
    page = (DOCS / "howto" / "frontend-language.md").read_text()
    for number, block in enumerate(BLOCK.findall(page)):
        file = Path(f"block{number}.py")
        exec(compile(block, str(file), "exec"), names)

    assert names["state"].error() is None
    assert capsys.readouterr().out == "yes"


def test_reference_names_everything_public():
    page = (DOCS / "reference" / "lang.md").read_text()
    howto = (DOCS / "howto" / "frontend-language.md").read_text()
    missing = [
        name
        for name in sgl.lang.__all__
        if name not in page + howto and not re.search(r"_(begin|end)$", name)
    ]
    assert missing == ["ProgramState", "ProgramStateGroup"]
    assert [n for n in ChatTemplateRegistry().names() if f"`{n}`" not in page] == []


def test_every_sampling_parameter_can_be_given():
    assert set(SamplingParams.__struct_fields__) >= {
        "repetition_penalty", "ebnf", "structural_tag", "logit_bias", "sampling_seed",
        "no_stop_trim",
    }  # fmt: skip
