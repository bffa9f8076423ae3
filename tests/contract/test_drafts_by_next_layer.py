"""Layers that guess further tokens (MTP) guess what transformers computes of the same layer."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from tests.contract.test_drafts_by_head import speculating
from tests.parity.checkpoints import VOCAB, write
from tests.parity.families import EXPERT
from tests.parity.rare import RARE
from tests.parity.serving import Serving

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

FAMILIES = {name: {**EXPERT, **RARE}[name] for name in ("glm4-moe", "deepseek-v3", "glm4-moe-lite")}
LAYERS = 2
PROMPTS = [[5, 9, 100, 31], [7] * 17, list(range(40, 60))]


class Reference:
    """A model of transformers, whose last layer is the one that guesses."""

    def __init__(self, model: transformers.PreTrainedModel, also: dict[str, torch.Tensor]) -> None:
        last = f"layers.{LAYERS}."
        self._also = {name.removeprefix(f"model.{last}"): w for name, w in also.items()}
        self._model, self._next = copy.deepcopy(model), copy.deepcopy(model)
        self._model.model.layers = model.model.layers[:LAYERS]
        self._next.model.layers = model.model.layers[LAYERS:]
        self._model.config.num_hidden_layers = LAYERS
        self._next.config.num_hidden_layers = 1
        self._next.model.norm.weight.data = self._also["shared_head.norm.weight"]
        self._next.lm_head.weight.data = self._also["shared_head.head.weight"]

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        known, found = list(tokens[1:]), list[int]()
        with torch.no_grad():
            hidden = self._model.model(torch.tensor([tokens[:-1]]), use_cache=False)[0]
            for _ in range(count):
                embeds = self._model.model.embed_tokens(torch.tensor([known]))
                both = self._normed("enorm", embeds), self._normed("hnorm", hidden)
                x = torch.cat(both, -1) @ self._also["eh_proj.weight"].T
                out = self._next.model(inputs_embeds=x, use_cache=False)[0]
                guess = int(self._next.lm_head(out[0, -1]).argmax())
                found.append(guess)
                known.append(guess)
                hidden = torch.cat([hidden, out[:, -1:]], 1)
        return found

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = self._model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self._also[f"{name}.weight"]


def make(name, path):
    """A checkpoint with such a layer, and its reference."""
    config = FAMILIES[name]()
    config.num_hidden_layers = LAYERS + 1
    for part in ("mlp_layer_types", "layer_types"):
        if getattr(config, part, None):
            setattr(config, part, ["dense", *["sparse"] * LAYERS])
    model = write(config, 3, path)
    file = path / "model.safetensors"
    weights, dim = load_file(file), config.hidden_size
    torch.manual_seed(4)
    also = {
        "enorm.weight": torch.rand(dim) + 0.5,
        "hnorm.weight": torch.rand(dim) + 0.5,
        "eh_proj.weight": torch.randn(dim, 2 * dim) * 0.1,
        "shared_head.norm.weight": torch.rand(dim) + 0.5,
        "shared_head.head.weight": torch.randn(VOCAB, dim) * 0.1,
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    also = {f"model.layers.{LAYERS}.{part}": weight for part, weight in also.items()}
    save_file(weights | also, file, metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for part in ("mlp_layer_types", "layer_types"):
        if raw.get(part):
            raw[part] = raw[part][:LAYERS]
    (path / "config.json").write_text(json.dumps(raw))
    return Reference(model, also)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_guesses_what_transformers_computes(tmp_path, name):
    reference = make(name, tmp_path)
    plain = Serving(tmp_path, runner="program").generate(PROMPTS, max_new_tokens=12)
    serving, speculation = speculating(tmp_path, None, "nextn", most=3)

    assert serving.generate(PROMPTS, max_new_tokens=12) == plain
    assert speculation.counts.failures == 0
    assert len(speculation.said) > 20
    for known, said in speculation.said[::3]:
        assert said == reference.guesses(known, len(said))
    sampled = {"temperature": 0.9, "max_new_tokens": 8}
    wanted = Serving(tmp_path, runner="program").generate(PROMPTS, **sampled)
    assert serving.generate(PROMPTS, **sampled) == wanted


@pytest.mark.parametrize(
    ("changes", "missing", "words"),
    [
        ({"num_nextn_predict_layers": 0}, None, "no layer that guesses further tokens"),
        ({}, "eh_proj.weight", "'model.layers.2.eh_proj.weight'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, None, "Qwen3MoeForCausalLM"),
    ],
)
def test_models_without_such_a_layer_are_refused(tmp_path, changes, missing, words):
    make("glm4-moe", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    if missing:
        weights = load_file(tmp_path / "model.safetensors")
        del weights[f"model.layers.{LAYERS}.{missing}"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError) as refused:
        speculating(tmp_path, None, "nextn")
    assert words in str(refused.value)
