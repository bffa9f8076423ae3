"""`sylvan train-draft`: from prompts to a head that drafts well, and is served."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sylvan.cli.main import main
from sylvan.kernels.native.library import describe
from tests.support.random_model import write_random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
]

SMALL = ("--answer-tokens", "24", "--batch-tokens", "512", "--depth", "3", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose next token follows from the newest one alone."""
    folder = write_random_model(tmp_path_factory.mktemp("model"), context_len=256)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [{"prompt": f"{i} and {chr(97 + i % 26)}{i * i}"} for i in range(180)]
    lines[3] = {"messages": [{"role": "user", "content": "Hello"}]}
    file.write_text("\n\n".join(map(json.dumps, lines)))
    return file


def test_a_head_learns_what_the_model_says_and_training_continues_after_a_break(
    model, prompts, tmp_path, capsys
):
    out = tmp_path / "head"
    call = ["train-draft", str(model), str(prompts), "--out", str(out), "--steps", "150", *SMALL]
    call += ["--rate", "0.01", "--words", "200"]
    assert main(call) == 0
    first = capsys.readouterr().out
    (out / "model.safetensors").unlink()
    assert main(call) == 0
    again = capsys.readouterr().out

    length = float(first.split("accept length ")[1].split(",")[0])
    assert length > 2.5
    assert "171 of 171 prompts answered" in first
    assert "answered" not in again
    assert "step" not in again.replace("--step", "")
    assert f"accept length {length:.2f}" in again
    assert f"--speculative-draft-model-path {out}" in again
    weights, config = (
        load_file(out / "model.safetensors"),
        json.loads((out / "config.json").read_text()),
    )
    assert len(weights["d2t"]) == config["draft_vocab_size"] == weights["t2d"].sum() <= 200

    assert main([*call[:-1], "150"]) == 2
    assert "holds a training run with different options" in capsys.readouterr().err


def test_a_tree_of_contexts_drafts_what_the_model_says(model, prompts, tmp_path, capsys):
    out = tmp_path / "contexts"
    call = ["train-draft", str(model), str(prompts), "--algorithm", "ngram", "--out", str(out)]
    call += [*SMALL, "--context-tokens", "8"]
    assert main(call) == 0
    said = capsys.readouterr().out

    length = float(said.split("accept length ")[1].split(",")[0])
    assert length > 2.5
    assert f"--speculative-algorithm ngram --speculative-draft-model-path {out}" in said
    contexts = int(said.split(" contexts;")[0].split("\n")[-1])
    assert 10 < contexts < 1000, "the newest token decides"
    assert [file.name for file in out.iterdir() if file.is_file()] == ["draft_contexts.npz"]
    assert main(call) == 0
    again = capsys.readouterr().out
    assert "answered" not in again
    assert f"accept length {length:.2f}" in again


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ("[1]", "[1] is not an object"),
        ('{"text": "a"}', "it has neither messages nor a prompt"),
        ('{"messages": []}', "it has neither messages nor a prompt"),
    ],
)
def test_lines_that_are_no_prompts_are_named(model, tmp_path, capsys, line, words):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)

    assert main(["train-draft", str(model), str(file), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert f"{file}, line 2" in error.replace("\n               ", " ")


def test_a_model_that_says_nothing_teaches_nothing(model, tmp_path, capsys):
    file = tmp_path / "data.txt"
    file.write_text("Hello\nHow are you?\n\n")
    call = ["train-draft", str(model), str(file), "--out", str(tmp_path / "out")]

    assert main([*call, "--answer-tokens", "1"]) == 2
    assert "answered none of the prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "MODEL and DATA are needed"),
        (("sapling", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("sapling", "x", "--steps", "0"), "--steps: expected a number in 1..10000000, not '0'"),
        (("sapling", "x", "--depth", "99"), "--depth: expected a number in 1..16, not '99'"),
        (("sapling", "x", "--rate", "fast"), "--rate: expected a number above 0"),
        (
            ("sapling", "x", "--algorithm", "mtp"),
            "--algorithm: expected eagle3 or ngram, not 'mtp'",
        ),
        (
            ("sapling", "x", "--context-tokens", "65"),
            "--context-tokens: expected a number in 1..64",
        ),
    ],
)
def test_bad_calls_are_refused_by_name(tmp_path, monkeypatch, capsys, words, complaint):
    monkeypatch.chdir(tmp_path)

    assert main(["train-draft", *words]) == 2
    assert complaint in capsys.readouterr().err
