"""`sylvan eval` says what a text costs a model, and how far a format is from the model itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from sylvan.cli.main import main
from sylvan.config.checkpoint import ASSETS
from sylvan.kernels.native.library import describe
from sylvan.runtime.executor.predictor import compared

SAPLING = ASSETS / "sapling"


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text"
    file.write_text("Hello! What is two plus two? Two plus two is four. " * 6, "utf-8")
    return str(file)


@pytest.mark.skipif(not describe().variant, reason="kernels are not compiled")
def test_a_model_is_compared_with_itself_and_with_a_format(text, capsys):
    common = ["eval", str(SAPLING), "--file", text, "--window", "64", "--against", str(SAPLING)]

    assert main(common) == 0
    same = capsys.readouterr().out
    assert main([*common, "--quantization", "fp8"]) == 0
    rounded = capsys.readouterr().out

    assert "KL divergence 0.00000 nats, same best token 100.00%" in same
    losses = [float(x) for x in re.findall(r"perplexity ([0-9.]+)", same)]
    assert losses[0] == losses[1] > 1
    assert 0 < float(re.search(r"divergence ([0-9.]+)", rounded)[1]) < 0.5


def test_sums_are_those_of_the_definitions():
    generator = torch.Generator().manual_seed(1)
    first, other = (
        torch.randn(5, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    targets = torch.tensor([[0], [1], [2], [3], [6]])

    found = compared([first, other], targets)

    kl = sum(
        float(p.exp()) * (float(p) - float(q))
        for p, q in zip(first.flatten(), other.flatten(), strict=True)
    )
    assert found[0, 0] == 0
    np.testing.assert_allclose(found[1, 0], kl)
    np.testing.assert_allclose(
        found[:, 1], [-sum(float(m[i, t]) for i, t in enumerate(targets)) for m in (first, other)]
    )
    assert found[0, 2] == 5
    assert found[1, 2] == sum(
        int(a.argmax() == b.argmax()) for a, b in zip(first, other, strict=True)
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--window", "3"], "--window: expected a number from 16 to 8192, not '3'"),
        (["--dtype", "int8"], "--dtype: expected bfloat16"),
        (["--file", "/nowhere/text"], "--file: cannot read"),
    ],
)
def test_wrong_values_are_named(text, capsys, more, words):
    assert main(["eval", str(SAPLING), "--file", text, *more]) == 2
    assert words in capsys.readouterr().err


def test_a_text_of_one_token_is_refused(tmp_path, capsys):
    (tmp_path / "text").write_text("", "utf-8")

    assert main(["eval", str(SAPLING), "--file", str(tmp_path / "text")]) == 2
    assert "fewer than two tokens" in capsys.readouterr().err
