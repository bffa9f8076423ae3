"""xLSTM's published computation (arXiv:2503.13427), written out; see `published`.

Transformers has the model, but keeps its states in float32 whatever the weights are, so that
rounding could not be distinguished from errors; and processes a text in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.parity.published import Tensors, gated, heads, rms

Raw = dict[str, Any]

HEADS = 4
XLSTM: Raw = {
    "architectures": ["xLSTMForCausalLM"],
    "model_type": "xlstm",
    "hidden_size": 64,
    "embedding_dim": 64,
    "num_heads": HEADS,
    "num_blocks": 3,
    "num_hidden_layers": 3,
    "ffn_proj_factor": 1.5,
    "ffn_round_up_to_multiple_of": 32,
    "gate_soft_cap": 3.0,
    "autocast_kernel_dtype": "float32",
    "output_logit_soft_cap": 4.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def xlstm(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens of a text."""
    dim, vocab = raw["hidden_size"], raw["vocab_size"]
    x = F.embedding(ids, w("backbone.embeddings.weight", vocab, dim))
    for layer in range(raw["num_blocks"]):
        at = f"backbone.blocks.{layer}."
        h = rms(x, w(f"{at}norm_mlstm.weight", dim), 1e-6)
        x = x + _memory(raw, w, f"{at}mlstm_layer.", h)
        h = rms(x, w(f"{at}norm_ffn.weight", dim), 1e-6)
        inner = 96
        names = ("proj_up_gate", inner, dim), ("proj_up", inner, dim), ("proj_down", dim, inner)
        x = x + gated(h, *(w(f"{at}ffn.{name}.weight", *shape) for name, *shape in names))
    x = rms(x, w("backbone.out_norm.weight", dim), 1e-6)
    cap = raw["output_logit_soft_cap"]
    return cap * torch.tanh(F.linear(x, w("lm_head.weight", vocab, dim)) / cap)


def _memory(raw: Raw, w: Tensors, at: str, x: torch.Tensor) -> torch.Tensor:
    dim, cap = raw["hidden_size"], raw["gate_soft_cap"]
    keys, values = dim // 2 // HEADS, dim // HEADS

    def linear(name: str, rows: int) -> torch.Tensor:
        return F.linear(x, w(f"{at}{name}.weight", rows, dim))

    def gate(name: str) -> torch.Tensor:
        found = linear(name, HEADS) + w(f"{at}{name}.bias", HEADS)
        return cap * torch.tanh(found / cap)

    q, k = heads(linear("q", dim // 2), keys), heads(linear("k", dim // 2), keys)
    v, into, keep = heads(linear("v", dim), values), gate("igate_preact"), gate("fgate_preact")
    matrix, total = x.new_zeros(HEADS, keys, values), x.new_zeros(HEADS, keys)
    scale, found = x.new_zeros(HEADS, 1), []
    for t in range(len(x)):
        kept = F.logsigmoid(keep[t])[:, None] + scale
        scale = torch.maximum(kept, into[t][:, None])
        old, new = torch.exp(kept - scale), torch.exp(into[t][:, None] - scale)
        matrix = old[..., None] * matrix + new[..., None] * (k[t][..., None] * v[t][:, None])
        total = old * total + new * k[t]
        asked = q[t] * keys**-0.5
        size = torch.maximum((asked * total).sum(-1, keepdim=True).abs(), torch.exp(-scale))
        found.append((asked[:, None] @ matrix)[:, 0] / (size + 1e-6))
    out = F.layer_norm(torch.stack(found), (values,), eps=1e-6).flatten(1)
    out = out * w(f"{at}multihead_norm.weight", dim)
    opened = torch.sigmoid(linear("ogate_preact", dim))
    return F.linear(opened * out, w(f"{at}out_proj.weight", dim, dim))
