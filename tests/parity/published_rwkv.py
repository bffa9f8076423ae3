"""RWKV-7's published computation (arXiv:2503.14456), written out; see `published`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.parity.published import Tensors, heads

Raw = dict[str, Any]

SIZE = 16
RWKV7: Raw = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "hidden_size": 64,
    "head_dim": SIZE,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "decay_low_rank_dim": 8,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 4,
    "gate_low_rank_dim": 12,
    "norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rwkv7(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens of a text."""
    dim, vocab = raw["hidden_size"], raw["vocab_size"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (dim,), w(f"{name}.weight", dim), w(f"{name}.bias", dim), 1e-5)

    x = F.embedding(ids, w("model.embeddings.weight", vocab, dim))
    x, first = norm("model.layers.0.pre_norm", x), None
    for layer in range(raw["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h, first = _time_mix(raw, w, at + "attn.", norm(at + "attn_norm", x), first)
        x = x + h
        h = norm(at + "ffn_norm", x)
        h = h + (_before(h) - h) * w(at + "ffn.x_k", dim)
        h = F.linear(h, w(at + "ffn.key.weight", raw["intermediate_size"], dim)).relu() ** 2
        x = x + F.linear(h, w(at + "ffn.value.weight", dim, raw["intermediate_size"]))
    return F.linear(norm("model.norm", x), w("lm_head.weight", vocab, dim))


def _before(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 1, 0))[:-1]


def _time_mix(
    raw: Raw, w: Tensors, at: str, x: torch.Tensor, first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = raw["hidden_size"]

    def mixed(letter: str) -> torch.Tensor:
        return x + (_before(x) - x) * w(f"{at}x_{letter}", 1, 1, dim)[0]

    def linear(letter: str) -> torch.Tensor:
        return F.linear(mixed(letter), w(f"{at}{letter}_proj.weight", dim, dim))

    def low_rank(letter: str, rank: str, act: Any, *, bias: bool = True) -> torch.Tensor:
        inner = act(F.linear(mixed(letter), w(f"{at}{letter}_lora.lora.0.weight", raw[rank], dim)))
        b = w(f"{at}{letter}_lora.lora.2.bias", dim) if bias else None
        return F.linear(inner, w(f"{at}{letter}_lora.lora.2.weight", dim, raw[rank]), b)

    r, k, v = linear("r"), linear("k"), linear("v")
    if first is None:
        first = v
    else:
        own = low_rank("v", "v_low_rank_dim", lambda x: x).sigmoid()
        v = v + (first - v) * own
    decay = torch.exp(
        -torch.exp(-F.softplus(-low_rank("w", "decay_low_rank_dim", torch.tanh)) - 0.5)
    )
    a = low_rank("a", "a_low_rank_dim", lambda x: x).sigmoid()
    g = low_rank("g", "gate_low_rank_dim", torch.sigmoid, bias=False)
    kk = F.normalize(heads(k * w(at + "k_k", dim), SIZE), dim=-1)
    k = k * (1 + (a - 1) * w(at + "k_a", dim))
    r, k, v, a, decay = (heads(part, SIZE) for part in (r, k, v, a, decay))
    state, out = r.new_zeros(dim // SIZE, SIZE, SIZE), []  # a row for each value column
    for t in range(len(x)):
        forgotten = state * decay[t][:, None] - (state @ kk[t][..., None]) * (kk[t] * a[t])[:, None]
        state = forgotten + v[t][..., None] * k[t][:, None]
        out.append((state @ r[t][..., None])[..., 0])
    found = torch.stack(out).flatten(1)
    weight, bias = w(at + "g_norm.weight", dim), w(at + "g_norm.bias", dim)
    found = F.group_norm(found, dim // SIZE, weight, bias, SIZE * 1e-5)
    direct = (r * k * w(at + "r_k", dim // SIZE, SIZE)).sum(-1, keepdim=True) * v
    found = (found + direct.flatten(1)) * g
    return F.linear(found, w(f"{at}o_proj.weight", dim, dim)), first
