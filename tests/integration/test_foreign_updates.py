"""Weights of models that run through transformers: replaced, read and refused as others are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

from sylvan.protocol.commands import (
    DiskTensors,
    HashWeights,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
)
from sylvan.runtime.models import registry
from tests.parity.checkpoints import SHAPE, write
from tests.parity.families import DENSE, EXPERT, FALLBACK
from tests.parity.rare import RARE
from tests.parity.serving import Serving
from tests.support.updates import PROMPTS, as_bytes, carry_out, weights_in, write_changed

CASES = {
    "gated products": lambda: transformers.LlamaConfig(**SHAPE),
    "a table that is the head": DENSE["gemma2"],
    "joined projections and biases": FALLBACK["persimmon"],
    "norms of heads": FALLBACK["cohere-qk-norm"],
    "learned positions": DENSE["opt"],
    "a scaled table": RARE["bart"],
}
SLOW = tuple(CASES)[2:]


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES],
)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    old, new = (tmp_path_factory.mktemp(name) for name in ("old", "new"))
    model = write(CASES[request.param](), 4, old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.delitem(registry.MODELS, model.config.architectures[0], raising=False)
        yield old, write_changed(old, new)


def checksums(serving: Serving) -> dict[str, str]:
    [found] = carry_out(serving, HashWeights())
    assert not found.error
    return found.body["checksums"]


def assert_as_fresh(serving: Serving, folder: Path, runner: str) -> None:
    fresh = Serving(folder, runner=runner)
    assert checksums(serving) == checksums(fresh)
    assert serving.generate(PROMPTS) == fresh.generate(PROMPTS)
    fresh.close()


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_answers_are_those_of_a_fresh_server(folders, runner):
    old, new = folders
    serving = Serving(old, runner=runner)
    before = checksums(serving)
    weights = weights_in(new)
    half = dict(list(weights.items())[: len(weights) // 2])
    wrong = {name: value.clone() for name, value in weights.items()}
    last = list(wrong)[-1]
    wrong[last].view(-1)[-1] = math.nan

    [refused] = carry_out(serving, UpdateWeights(as_bytes(wrong)))
    assert refused.status == 400
    assert last in refused.error
    assert checksums(serving) == before

    parts = (half, {name: value for name, value in weights.items() if name not in half})
    results = carry_out(serving, *(UpdateWeights(as_bytes(part)) for part in parts))
    assert [found.error for found in results] == ["", ""]
    assert_as_fresh(serving, new, runner)
    for name in (last, next(iter(weights))):
        [read] = carry_out(serving, ReadWeights(name, most=1000))
        assert torch.equal(torch.tensor(read.body["values"]), weights[name].float())

    whole = UpdateWeights(DiskTensors(str(old)), partial=False)
    there, gone, again = carry_out(serving, whole, ReleaseMemory(), ResumeMemory())
    assert [found.error for found in (there, gone, again)] == ["", "", ""]
    assert checksums(serving) == before
    assert_as_fresh(serving, old, runner)
    serving.close()


def test_experts_that_transformers_joins_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    architecture = write(EXPERT["qwen3-moe"](), 5, tmp_path).config.architectures[0]
    monkeypatch.delitem(registry.MODELS, architecture, raising=False)
    serving = Serving(tmp_path, runner="auto")
    answer = serving.generate(PROMPTS)

    [refused] = carry_out(serving, UpdateWeights(DiskTensors(str(tmp_path)), partial=False))

    assert refused.status == 400
    assert "cannot be read or replaced while serving" in refused.error
    assert serving.generate(PROMPTS) == answer
    serving.close()
