"""Layers that draft further tokens (MTP) draft what transformers computes of the same layer."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from tests.contract.test_drafts_by_head import speculating
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.families import EXPERT
from tests.parity.rare import RARE, RECURRENT
from tests.parity.serving import Serving

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

ALL = {"qwen2": lambda: transformers.Qwen2Config(**SHAPE), **EXPERT, **RARE, **RECURRENT}
LAYERS = 2
PROMPTS = [[5, 9, 100, 31], [7] * 17, list(range(40, 60))]


@dataclass(frozen=True)
class Names:
    """How a family names the tensors of such a layer; `head` None: that of the model."""

    base: str  # configuration of the model in transformers
    block: str = f"model.layers.{LAYERS}."
    embed_norm: str = f"model.layers.{LAYERS}.enorm"
    hidden_norm: str = f"model.layers.{LAYERS}.hnorm"
    joined: str = f"model.layers.{LAYERS}.eh_proj"
    norm: str | None = f"model.layers.{LAYERS}.shared_head.norm"
    head: str | None = f"model.layers.{LAYERS}.shared_head.head"
    hidden_first: bool = False
    offset: float = 0.0  # of norms
    given: dict[str, object] = field(default_factory=dict)  # of the model's config
    raw: dict[str, object] = field(default_factory=dict)  # in config.json


FAMILIES = {
    "glm4-moe": Names("glm4-moe"),
    "deepseek-v3": Names("deepseek-v3"),
    "glm4-moe-lite": Names("glm4-moe-lite"),
    "mimo": Names(
        "qwen2",
        block="model.mtp_layers.0.",
        embed_norm="model.mtp_layers.0.token_layernorm",
        hidden_norm="model.mtp_layers.0.hidden_layernorm",
        joined="model.mtp_layers.0.input_proj",
        norm="model.mtp_layers.0.final_layernorm",
        head=None,
        hidden_first=True,
        given={"layer_types": ["full_attention"] * (LAYERS + 1)},
        raw={"architectures": ["MiMoForCausalLM"], "model_type": "mimo"},
    ),
    "qwen3-next": Names(
        "qwen3-next",
        block="mtp.layers.0.",
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        joined="mtp.fc",
        norm="mtp.norm",
        head=None,
        offset=1.0,
        given={"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
    "ernie4-5-moe": Names(
        "ernie4-5-moe",
        block="model.mtp_block.0.",
        embed_norm="model.mtp_emb_norm.0",
        hidden_norm="model.mtp_hidden_norm.0",
        joined="model.mtp_linear_proj.0",
        norm=None,
        head=None,
        given={"moe_layer_end_index": LAYERS - 1},
    ),
}


class Reference:
    """A model of transformers, whose last layer is the one that drafts."""

    def __init__(
        self, model: transformers.PreTrainedModel, names: Names, also: dict[str, torch.Tensor]
    ) -> None:
        self._names, self._also = names, also
        self._model, self._next = copy.deepcopy(model), copy.deepcopy(model)
        self._model.model.layers = model.model.layers[:LAYERS]
        self._next.model.layers = model.model.layers[LAYERS:]
        self._model.config.num_hidden_layers = LAYERS
        self._next.config.num_hidden_layers = 1
        if getattr(model.config, "layer_types", None):
            self._model.config.layer_types = model.config.layer_types[:LAYERS]
            self._next.config.layer_types = model.config.layer_types[LAYERS:]
        if names.norm:
            self._next.model.norm.weight.data = also[f"{names.norm}.weight"]
        else:
            self._next.model.norm = torch.nn.Identity()
        if names.head:
            self._next.lm_head.weight.data = also[f"{names.head}.weight"]

    def drafted(self, tokens: list[int], count: int) -> list[int]:
        known, found = list(tokens[1:]), list[int]()
        names = self._names
        with torch.no_grad():
            hidden = self._model.model(torch.tensor([tokens[:-1]]), use_cache=False)[0]
            for _ in range(count):
                embeds = self._model.model.embed_tokens(torch.tensor([known]))
                both = [self._normed(names.embed_norm, embeds)]
                both.insert(not names.hidden_first, self._normed(names.hidden_norm, hidden))
                x = torch.cat(both, -1) @ self._also[f"{names.joined}.weight"].T
                out = self._next.model(inputs_embeds=x, use_cache=False)[0]
                token = int(self._next.lm_head(out[0, -1]).argmax())
                found.append(token)
                known.append(token)
                hidden = torch.cat([hidden, out[:, -1:]], 1)
        return found

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self._also[f"{name}.weight"], self._model.config.rms_norm_eps
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + self._names.offset)
        )


def make(name, path):
    """A checkpoint with such a layer, and its reference."""
    names = FAMILIES[name]
    config = ALL[names.base]()
    config.num_hidden_layers = LAYERS + 1
    for part in ("mlp_layer_types", "layer_types"):
        if getattr(config, part, None) and part not in names.given:
            setattr(config, part, ["dense", *["sparse"] * LAYERS])
    for part, value in names.given.items():
        setattr(config, part, value)
    model = write(config, 3, path)
    file = path / "model.safetensors"
    weights, dim = load_file(file), config.hidden_size
    torch.manual_seed(4)
    also = {
        f"{names.embed_norm}.weight": torch.rand(dim) + 0.5 - names.offset,
        f"{names.hidden_norm}.weight": torch.rand(dim) + 0.5 - names.offset,
        f"{names.joined}.weight": torch.randn(dim, 2 * dim) * 0.1,
    }
    if names.norm:
        also[f"{names.norm}.weight"] = torch.rand(dim) + 0.5 - names.offset
    if names.head:
        also[f"{names.head}.weight"] = torch.randn(VOCAB, dim) * 0.1
        also[f"{names.block}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    last = f"model.layers.{LAYERS}."
    renamed = {
        n.replace(last, names.block) if n.startswith(last) else n: w for n, w in weights.items()
    }
    save_file(renamed | also, file, metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1} | names.raw
    for part in ("mlp_layer_types", "layer_types"):
        if raw.get(part):
            raw[part] = raw[part][:LAYERS]
    (path / "config.json").write_text(json.dumps(raw))
    return Reference(model, names, also)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_it_drafts_what_transformers_computes(tmp_path, name):
    reference = make(name, tmp_path)
    plain = Serving(tmp_path, runner="auto").generate(PROMPTS, max_new_tokens=12)
    serving, speculation = speculating(tmp_path, None, "nextn", limit=3, runner="auto")

    assert serving.generate(PROMPTS, max_new_tokens=12) == plain
    assert speculation.counts.failures == 0
    assert len(speculation.said) > 20
    for known, said in speculation.said[::3]:
        assert said == reference.drafted(known, len(said))
    sampled = {"temperature": 0.9, "max_new_tokens": 8}
    wanted = Serving(tmp_path, runner="auto").generate(PROMPTS, **sampled)
    assert serving.generate(PROMPTS, **sampled) == wanted


@pytest.mark.parametrize(
    ("changes", "missing", "words"),
    [
        ({"num_nextn_predict_layers": 0}, None, "no multi-token prediction layer"),
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
