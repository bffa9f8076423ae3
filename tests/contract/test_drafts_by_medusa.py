"""Medusa heads: they draft what their definition says, and answers are those without them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.build import resolved
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.speculation.medusa_worker import medusa_worker
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from tests.contract.test_drafts_by_head import Told
from tests.contract.test_drafts_by_model import PROMPTS, WAYS, Ticks
from tests.parity.serving import Serving
from tests.support.draft_heads import model_outputs
from tests.support.random_model import HIDDEN, VOCAB, write_random_model

HEADS, BLOCKS = 3, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


@pytest.fixture(scope="module")
def expected(model_dir):
    serving = Serving(model_dir, runner="auto")
    return {way: serving.generate(PROMPTS, max_new_tokens=24, **ask) for way, ask in WAYS.items()}


def write_heads(folder, layout, *, words=None, changes=None, **config):
    """Heads with random weights; returns the directory, and [(blocks, matrix)] of each head."""
    folder.mkdir()
    rng = np.random.default_rng(5)

    def matrix(*shape):
        return rng.normal(0, 0.2, shape).astype(np.float32)

    heads = [
        ([(matrix(HIDDEN, HIDDEN), matrix(HIDDEN)) for _ in range(BLOCKS)], matrix(VOCAB, HIDDEN))
        for _ in range(HEADS)
    ]
    weights = {}
    for i, (blocks, words_matrix) in enumerate(heads):
        for j, (weight, bias) in enumerate(blocks):
            stem = f"{i}.{j}.linear" if layout == "authors" else f"blocks.{i}.layers.{j}"
            weights |= {f"{stem}.weight": weight, f"{stem}.bias": bias}
        name = f"{i}.{BLOCKS}.weight" if layout == "authors" else f"lm_heads.{i}.weight"
        weights[name] = words_matrix
    if words is not None:
        weights["token_map"] = np.array(words)
    weights |= changes or {}
    file = "medusa_lm_head.safetensors" if layout == "authors" else "model.safetensors"
    kept = {name: w for name, w in weights.items() if w is not None}
    save_file(kept, folder / file, metadata={"format": "pt"})
    about = (
        {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS}
        if layout == "authors"
        else {"num_heads": HEADS, "num_hidden_layers": BLOCKS, "architectures": ["MedusaModel"]}
    )
    (folder / "config.json").write_text(json.dumps(about | config))
    return folder, heads


def expected_draft(model_dir, heads, tokens, count, words=None):
    """Written out: each head reads the vector before the newest token."""
    plain = load_file(model_dir / "model.safetensors")
    weights = {name: torch.from_numpy(array) for name, array in plain.items()}
    _, final_TD = model_outputs(weights, tokens[:-1])
    found = []
    for blocks, matrix in heads[:count]:
        x = final_TD[-1]
        for weight, bias in blocks:
            x = x + F.silu(torch.from_numpy(weight) @ x + torch.from_numpy(bias))
        logits = torch.from_numpy(matrix) @ x
        best = int(logits.argmax()) if words is None else words[int(logits[words].argmax())]
        found.append(best)
    return found


def speculating(model_dir, folder, *, adaptive=False, limit=4, **options):
    speculation = Told(limit, VOCAB, adaptive=adaptive, clock=Ticks())

    def build(path, local):
        return build_executor(
            path, local, parts=ExecutorParts((*STANDARD_WORKERS, medusa_worker(folder)))
        )

    options = {"runner": "auto"} | options
    return Serving(model_dir, capabilities=(speculation,), build=build, **options), speculation


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["authors", "vllm", "vllm, few words"])
@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_they_draft_what_their_definition_says(model_dir, expected, tmp_path, layout, runner):
    words = list(range(3, VOCAB, 2)) if "few" in layout else None
    folder, heads = write_heads(tmp_path / "heads", layout.split(",")[0], words=words)
    serving, speculation = speculating(model_dir, folder, runner=runner)
    found = serving.generate(PROMPTS, max_new_tokens=24)

    if runner == "auto":
        assert found == expected["greedy"]
    assert speculation.counts.failures == 0
    assert len(speculation.said) > 40
    for known, said in speculation.said[::5]:
        assert len(said) <= HEADS
        assert said == expected_draft(model_dir, heads, known, len(said), words)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_tokens_are_those_without(model_dir, expected, tmp_path, way, adaptive):
    folder, _ = write_heads(tmp_path / "heads", "authors")
    serving, speculation = speculating(
        model_dir, folder, adaptive=adaptive, pages=14, chunk_tokens=8, preempt_every=7
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way])
        assert found == expected[way]
    assert speculation.counts.failures == 0
    assert serving.scheduler.audit() == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads must be in 1..64"),
        ({"medusa_num_heads": HEADS + 1}, f"'{HEADS}.0.linear.weight' is missing"),
        ({"changes": {"0.0.linear.weight": None}}, "has no Medusa heads"),
        ({"changes": {f"1.{BLOCKS}.weight": np.zeros((7, HIDDEN), np.float32)}}, "has shape [7,"),
        ({"words": [0, VOCAB]}, f"not in 0..{VOCAB - 1}"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(model_dir, tmp_path, wrong, words):
    folder, _ = write_heads(tmp_path / "heads", "authors", **wrong)

    with pytest.raises(ConfigError) as refused:
        speculating(model_dir, folder)
    assert words in str(refused.value)
    assert "speculative.draft_model" in str(refused.value)


def test_the_authors_pickle_needs_the_word_of_its_owner(model_dir, tmp_path):
    folder, _ = write_heads(tmp_path / "heads", "authors")
    file = folder / "medusa_lm_head.safetensors"
    torch.save(
        {name: torch.from_numpy(w) for name, w in load_file(file).items()},
        folder / "medusa_lm_head.pt",
    )
    file.unlink()
    with pytest.raises(ConfigError, match="--load-format pt"):
        speculating(model_dir, folder)


def test_sglang_spells_it_so(model_dir, tmp_path):
    folder, _ = write_heads(tmp_path / "heads", "authors")
    keywords = {"model": str(model_dir), "speculative_algorithm": "MEDUSA"}
    found = resolved(
        gather(from_keywords(keywords | {"speculative_draft_model_path": str(folder)})).config
    )
    assert found.speculative.algorithm == "medusa"
    assert found.speculative.num_steps == 4
