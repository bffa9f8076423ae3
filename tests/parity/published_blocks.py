"""Models that fill blocks by diffusion: the published computation, and the published schedule.

Sources: the modelling files of SDAR and of LLaDA 2, with their `generate`: a token sees its block
and all before it, and logits in a row are for that row. `generate.py` of LLaDA 1 and
`generation_utils.py` of Dream (maskgit_plus): tokens see everything, and Dream's logits in a row
are for the next.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tests.parity.checkpoints import VOCAB
from tests.parity.published import Published, Tensors, attend, gated, heads, rms, turned
from tests.parity.published_models import SIZES, bailing

Raw = dict[str, Any]
MASK = VOCAB - 1
SDAR: Raw = SIZES | {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "head_dim": 24,
    "rope_theta": 10_000.0,
    "block_size": 4,
    "mask_token_id": MASK,
}
SDAR_MOE: Raw = SDAR | {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
LLADA2: Raw = SIZES | {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "head_dim": 16,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "block_size": 8,
    "mask_token_id": MASK,
}


def sdar(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Qwen 3's layers, with or without experts."""
    dim, eps, size = raw["hidden_size"], raw["rms_norm_eps"], raw["head_dim"]
    queries, kv = raw["num_attention_heads"] * size, raw["num_key_value_heads"] * size
    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = rms(x, w(at + "input_layernorm.weight", dim), eps)
        q, k, v = (
            heads(F.linear(h, w(f"{at}self_attn.{name}_proj.weight", rows, dim)), size)
            for name, rows in (("q", queries), ("k", kv), ("v", kv))
        )
        q = turned(rms(q, w(at + "self_attn.q_norm.weight", size), eps), raw["rope_theta"])
        k = turned(rms(k, w(at + "self_attn.k_norm.weight", size), eps), raw["rope_theta"])
        h = attend(q, k, v, block=raw["block_size"])
        x = x + F.linear(h, w(at + "self_attn.o_proj.weight", dim, queries))
        h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
        x = x + _feed_forward(raw, w, at + "mlp.", h, i)
    x = rms(x, w("model.norm.weight", dim), eps)
    return F.linear(x, w("lm_head.weight", VOCAB, dim))


def _feed_forward(raw: Raw, w: Tensors, at: str, h: torch.Tensor, layer: int) -> torch.Tensor:
    dim = raw["hidden_size"]
    inner = raw.get("moe_intermediate_size") or raw.get("expert_intermediate_size")

    def one(name: str, inner: int) -> torch.Tensor:
        shapes = (("gate", (inner, dim)), ("up", (inner, dim)), ("down", (dim, inner)))
        return gated(h, *(w(f"{at}{name}{part}_proj.weight", *shape) for part, shape in shapes))

    if "num_experts" not in raw or not raw.get("moe_layer_freq", [1] * 3)[layer]:
        return one("", raw["intermediate_size"])
    logits = F.linear(h, w(at + "gate.weight", raw["num_experts"], dim))
    best = logits.softmax(-1).topk(raw["num_experts_per_tok"], -1)
    total = best.values.sum(-1, keepdim=True) if raw.get("norm_topk_prob") else 1.0
    shares = torch.zeros_like(logits).scatter(1, best.indices, best.values / total)
    parts = [one(f"experts.{e}.", inner) * shares[:, e, None] for e in range(raw["num_experts"])]
    return torch.stack(parts).sum(0)


DREAM: Raw = SIZES | {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "rope_theta": 10_000.0,
    "mask_token_id": MASK,
}
LLADA: Raw = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 3,
    "mlp_hidden_size": 112,
    "embedding_size": VOCAB,
    "vocab_size": VOCAB,
    "max_sequence_length": 256,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "block_type": "llama",
    "activation_type": "silu",
    "weight_tying": False,
    "mask_token_id": MASK,
    "eos_token_id": 2,
}


def seeing_all(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """LLaDA 1 and Dream: Llama whose tokens see the whole text; biases as in Qwen 2 for Dream."""
    llada = "d_model" in raw
    dim, eps, size = 64, raw["rms_norm_eps"], 16
    inner, kv, top = 112, 2 * size, "model.transformer." if llada else "model."

    def linear(theirs: str, ours: str, x: torch.Tensor, rows: int, *, bias: bool = False) -> Any:
        name = theirs if llada else ours
        b = w(name + ".bias", rows) if bias and not llada else None
        return F.linear(x, w(name + ".weight", rows, x.shape[-1]), b)

    table = w(top + ("wte" if llada else "embed_tokens") + ".weight", VOCAB, dim)
    x = F.embedding(ids, table)
    for i in range(3):
        at = f"{top}{'blocks' if llada else 'layers'}.{i}."
        first, second = (
            ("attn_norm", "ff_norm") if llada else ("input_layernorm", "post_attention_layernorm")
        )
        h = rms(x, w(f"{at}{first}.weight", dim), eps)
        q, k, v = (
            heads(linear(f"{at}{p}_proj", f"{at}self_attn.{p}_proj", h, n, bias=True), size)
            for p, n in (("q", dim), ("k", kv), ("v", kv))
        )
        h = attend(turned(q, 10_000.0), turned(k, 10_000.0), v, block=len(ids))
        x = x + linear(at + "attn_out", at + "self_attn.o_proj", h, dim)
        h = rms(x, w(f"{at}{second}.weight", dim), eps)
        gate = F.silu(linear(at + "ff_proj", at + "mlp.gate_proj", h, inner))
        up = linear(at + "up_proj", at + "mlp.up_proj", h, inner)
        x = x + linear(at + "ff_out", at + "mlp.down_proj", gate * up, dim)
    x = rms(x, w(top + ("ln_f" if llada else "norm") + ".weight", dim), eps)
    return linear(top + "ff_out", "lm_head", x, VOCAB)


LLADA_MOE: Raw = SIZES | {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "rope_theta": 50_000.0,
    "qk_layernorm": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "expert_intermediate_size": 24,
    "dense_intermediate_size": 112,
    "moe_layer_freq": [0, 1, 1],
    "mask_token_id": MASK,
}


def llada_moe(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Qwen 3's layers with experts, whose tokens see the whole text."""
    return sdar(raw | {"block_size": len(ids), "head_dim": 16}, w, ids)


FILLING = {"sdar": (SDAR, sdar), "sdar-moe": (SDAR_MOE, sdar), "llada2": (LLADA2, bailing)}
WHOLE = {
    "llada": (LLADA, seeing_all),
    "llada-moe": (LLADA_MOE, llada_moe),
    "dream": (DREAM, seeing_all),
}
"""Models whose tokens see the whole answer."""


def filling(name: str, folder: Path) -> Published:
    """Write a checkpoint; return its computation."""
    raw, run = (FILLING | WHOLE)[name]
    model = Published(raw, run, len(name)).eval()
    model.write(folder)
    return model


def written(
    model: Published, prompt: list[int], count: int, *, steps: int, confidence: float
) -> tuple[list[int], int]:
    """Greedy output of the published schedule without the mask, and its forward passes."""
    block = model.raw["block_size"]
    end = -(-(len(prompt) + count) // block) * block
    ids = torch.full((end,), MASK)
    ids[: len(prompt)] = torch.tensor(prompt)
    passes = 0
    for start in range(len(prompt) // block * block, end, block):
        for step in range(block + 1):
            open_ = torch.arange(block) + start >= len(prompt)
            open_ &= ids[start : start + block] == MASK
            if not open_.any():
                break
            with torch.inference_mode():
                logits = model(ids[None, : start + block]).logits[0, start:]
            passes, logits = passes + 1, logits.clone()
            logits[:, MASK] = -math.inf
            chance, best = logits.softmax(-1).max(-1)
            chance[~open_] = -math.inf
            quota = block // steps + (step < block % steps) or 1
            take = chance > confidence
            if take.sum() < quota:
                some = chance.topk(min(quota, int(open_.sum()))).indices
                take = torch.zeros(block, dtype=torch.bool).scatter(0, some, value=True)
            ids[start : start + block][take] = best[take]
    return ids[len(prompt) : len(prompt) + count].tolist(), passes


def written_whole(
    model: Published, prompt: list[int], count: int, *, steps: int, block: int
) -> list[int]:
    """The same of models that see the whole answer, block by block of it.

    LLaDA fills as many places in each pass of a block, Dream as many as its times say.
    """
    dream = model.raw["model_type"] == "Dream"
    ids = torch.tensor(prompt + [MASK] * count)
    for start in range(len(prompt), len(ids), block):
        stop = min(start + block, len(ids))
        size, times = stop - start, torch.linspace(1, 1e-3, steps + 1, dtype=torch.float64)
        for step in range(steps):
            with torch.inference_mode():
                logits = model(ids[None]).logits[0]
            logits = torch.cat((logits[:1], logits[:-1])) if dream else logits.clone()
            logits[:, MASK] = -math.inf
            chance, best = logits.softmax(-1).max(-1)
            open_ = ids == MASK
            open_[:start], open_[stop:] = False, False
            left = int(open_.sum())
            quota = size // steps + (step < size % steps)
            if dream:
                share = 1 - float(times[step + 1] / times[step])
                quota = left if step == steps - 1 else int(left * share)
            take = chance.masked_fill(~open_, -math.inf).topk(min(quota, left)).indices
            ids[take] = best[take]
    return ids[len(prompt) :].tolist()
