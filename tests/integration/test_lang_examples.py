"""The examples of the frontend language run, on a scripted backend."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sylvan import lang as sgl

FOLDER = Path(__file__).parents[2] / "examples" / "lang"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend():
    """Makes a scripted backend the default one."""

    def make(answer="ok", **options):
        made = sgl.Scripted(answer, **options)
        sgl.set_default_backend(made)
        return made

    yield make
    sgl.set_default_backend(None)


def test_few_shot_caches_the_examples_once(backend):
    happy = {"positive": -1.0, "negative": -2.0}
    made = backend(score=lambda prompt, choice: happy[choice] * (-1 if "money" in prompt else 1))
    module = load("few_shot")

    assert module.run() == ["positive", "negative", "positive"]
    assert [c.text for c in made.calls if c.kind == "cache"] == [module.EXAMPLES + "Review: "]


def test_multi_turn_streams(backend):
    backend(["Hello Ada.", "42", "Ada"])
    shown = []
    assert load("multi_turn").run(show=shown.append) == ["Hello Ada.", "42", "Ada"]
    assert "".join(shown) == "Hello Ada.\n42\nAda\n"


def test_self_consistency_votes(backend):
    backend(["12 + 7 = 19, 19 - 5 = 14", "14", "It is 13", "so 14", "none"])
    assert load("self_consistency").run() == [("14", 3), ("13", 1)]


def test_tree_of_thought_takes_the_most_confident(backend):
    def score(prompt, choice):
        good = "good" in prompt and choice == "yes"
        return -0.1 if good else -1.0

    backend(["plan", "plan", "bad", "good", "bad", "bad"], score=score)
    margin, solution = load("tree_of_thought").run()
    assert solution == "good"
    assert margin == pytest.approx(0.9)


def test_tip_expansion_keeps_the_order(backend):
    backend(lambda text: re.search(r"tip (\d) in one sentence.\nASSISTANT:$", text).group(1))
    assert load("tip_expansion").run() == "Eat well. 1\nSleep enough. 2\nMove every day. 3\n"


def test_json_extraction_sends_the_schema(backend):
    made = backend('{"name": "Maria", "age": 31, "city": "Lisbon"}')
    module = load("json_extraction")
    assert module.run()[0]["age"] == 31
    params = [call.params for call in made.calls if call.params]
    assert {p.json_schema for p in params} == {module.SCHEMA}
    assert json.loads(module.SCHEMA)["required"] == ["name", "age", "city"]


def test_react_calls_tools_until_it_finishes(backend):
    backend(
        [" add", "add[17, 25]", " age", "age[Ada]", " add", "add[42, 36]", " done", "finish[78]"]
    )
    answer, steps = load("react").run()
    assert answer == "78"
    assert re.findall(r"Observation: (\d+)", steps) == ["42", "36", "78"]


def test_react_gives_up(backend):
    backend([" hm", "add[1, 1]"])
    assert load("react").run()[0] is None


def test_rag_finds_the_passages(backend, tmp_path):
    module = load("rag")
    for name, text in module.NOTES.items():
        (tmp_path / name).write_text(text)
    made = backend()

    assert module.run(module.read_folder(tmp_path)) == ["ok", "ok"]
    prompts = [call.text for call in made.calls if call.kind == "generate"]
    assert any("opens at 9" in p and "When does" in p for p in prompts)
    assert any("12 euros" in p and "How much" in p for p in prompts)


def test_llm_judge_judges_every_dimension(backend):
    backend(lambda text: re.findall(r"Judge its (\w+)", text)[-1], score=lambda p, c: -ord(c[0]))
    assert load("llm_judge").run() == (["clarity", "originality", "evidence"], "A")


def test_api_speculation_saves_a_call_and_changes_nothing():
    class Completion(sgl.Scripted):
        def generate(self, s, sampling_params):
            text, _ = super().generate(s, sampling_params)
            return text, {"finish_reason": "length"}

    made = Completion(
        lambda text: " 1906\nJob: admiral\n" if text.endswith("Born:") else " admiral\n"
    )
    plain, speculative = load("api_speculation").run(made)

    assert plain == speculative == (" 1906", " admiral")
    assert len(made.calls) == 3


def test_graph_is_drawn(tmp_path):
    file = tmp_path / "g.svg"
    command = [sys.executable, str(FOLDER / "draw_graph.py"), "--output", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    ET.fromstring(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_example_says_how_it_is_called(name):
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage:")
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text()
