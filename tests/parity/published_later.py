"""Published computations of models of 2025 and 2026; see `published` and `published_models`.

Sources: the modelling files that come with the checkpoints of Nanbeige 4.2, Spark X2.5 and K2
Horizon; `modeling_mistral4` of transformers, and the tensor names of Mistral Large 3 in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from tests.parity.checkpoints import VOCAB
from tests.parity.published import Run, Tensors, attend, best, experts, gated, heads, rms, turned
from tests.parity.published_more import within

Raw = dict[str, Any]
LLAMA: Raw = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def linear(w: Tensors, name: str, x: torch.Tensor, rows: int) -> torch.Tensor:
    return F.linear(x, w(name + ".weight", rows, x.shape[-1]))


def mlp(w: Tensors, name: str, x: torch.Tensor, inner: int) -> torch.Tensor:
    dim = x.shape[-1]
    shapes = {"gate": (inner, dim), "up": (inner, dim), "down": (dim, inner)}
    return gated(x, *(w(f"{name}.{part}_proj.weight", *shape) for part, shape in shapes.items()))


def nanbeige(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, eps, size = raw["hidden_size"], raw["rms_norm_eps"], 16
    kv = raw["num_key_value_heads"] * size
    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    for _ in range(raw["num_loops"]):
        for i in range(raw["num_hidden_layers"]):
            at = f"model.layers.{i}."
            h = rms(x, w(at + "input_layernorm.weight", dim), eps)
            rows = {"q": dim, "k": kv, "v": kv}
            q, k, v = (
                heads(linear(w, f"{at}self_attn.{p}_proj", h, n), size) for p, n in rows.items()
            )
            seen = attend(turned(q, raw["rope_theta"]), turned(k, raw["rope_theta"]), v)
            x = x + linear(w, at + "self_attn.o_proj", seen, dim)
            h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
            x = x + mlp(w, at + "mlp", h, raw["intermediate_size"])
        x = rms(x, w("model.norm.weight", dim), eps)
    return linear(w, "lm_head", x, VOCAB)


def spark(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, eps, size = raw["hidden_size"], raw["rms_norm_eps"], raw["head_dim"]
    count, groups = raw["num_attention_heads"], raw["num_key_value_heads"]
    x = F.embedding(ids, w("model.embedding.weight", VOCAB, dim))
    for i, kind in enumerate(raw["layer_types"]):
        at, rope = f"model.layers.{i}.", raw["rope_parameters"][kind]
        h = rms(x, w(at + "input_layernorm.weight", dim), eps)
        qkv = heads(linear(w, at + "self_attn.q_k_v_proj", h, (count + 2 * groups) * size), size)
        q, k, v = qkv.split([count, groups, groups], 1)
        how = rope["rope_theta"], rope["partial_rotary_factor"]
        window = raw["sliding_window"] if kind == "sliding_attention" else len(ids)
        seen = heads(within(turned(q, *how), turned(k, *how), v, window), size)
        seen = seen * linear(w, at + "self_attn.g_proj", h, count).sigmoid()[..., None]
        x = x + linear(w, at + "self_attn.out_proj", seen.flatten(1), dim)
        h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
        inner = raw["intermediate_size"]
        gate, up = (linear(w, f"{at}mlp.{part}_proj", h, inner) for part in ("gate", "up"))
        x = x + linear(w, at + "mlp.down_proj", F.gelu(gate) * up, dim)
    x = rms(x, w("model.norm.weight", dim), eps)
    return linear(w, "lm_head", x, VOCAB)


def _turned_in_halves(x_TNH: torch.Tensor, base: float, part: int) -> torch.Tensor:
    """The pairs of smallest angles of both halves, `part` columns in all."""
    first, second = x_TNH.chunk(2, -1)
    turning = torch.cat((first[..., : part // 2], second[..., : part // 2]), -1)
    a, b = turned(turning, base).chunk(2, -1)
    return torch.cat((a, first[..., part // 2 :], b, second[..., part // 2 :]), -1)


def xllm(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, eps, size = raw["hidden_size"], raw["rms_norm_eps"], raw["head_dim"]
    wide, kv = raw["num_attention_heads"] * size, raw["num_key_value_heads"] * size
    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = rms(x, w(at + "input_layernorm.weight", dim), eps)
        rows = {"q": wide, "k": kv, "v": kv}
        q, k, v = (heads(linear(w, f"{at}self_attn.{p}_proj", h, n), size) for p, n in rows.items())
        how = raw["rope_theta"], raw.get("rope_head_dim", size)
        seen = attend(_turned_in_halves(q, *how), _turned_in_halves(k, *how), v)
        x = x + linear(w, at + "self_attn.o_proj", seen, dim)
        h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
        if not raw.get("num_experts") or i in raw["mlp_only_layers"]:
            x = x + mlp(w, at + "mlp", h, raw["intermediate_size"])
            continue
        x = x + _xllm_experts(raw, w, at + "mlp.", h)
    x = rms(x, w("model.norm.weight", dim), eps)
    return linear(w, "lm_head", x, VOCAB)


def _xllm_experts(raw: Raw, w: Tensors, at: str, h: torch.Tensor) -> torch.Tensor:
    inner, count = raw["moe_intermediate_size"], raw["num_experts"]
    scores = linear(w, at + "gate", h, count).sigmoid()
    shares = best(scores, raw["num_experts_per_tok"], scores + w(at + "gate.bias", count))
    shares = shares / shares.sum(-1, keepdim=True) * raw["router_scaling_factor"]
    routed = experts(h, shares, lambda e, h: mlp(w, f"{at}experts.{e}", h, inner))
    return routed + mlp(w, at + "shared_experts", h, inner * raw["num_shared_experts"])


@dataclass(frozen=True)
class _Names:
    """Names of tensors; `of_mlp` and `of_moe` are those of a feed-forward block."""

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    queries: tuple[str, str, str] = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    keys: tuple[str, str, str] = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    out: str = "o_proj"
    of_mlp: str = "mlp."
    of_moe: str = "mlp."
    factors: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    norm: str = "model.norm"
    head: str = "lm_head"


def mistral(names: _Names) -> Run:
    """Latent attention whose late queries are scaled, and experts chosen by softmax."""

    def block(w: Tensors, at: str, h: torch.Tensor, inner: int) -> torch.Tensor:
        dim = h.shape[-1]
        shapes = (inner, dim), (inner, dim), (dim, inner)
        parts = zip(names.factors, shapes, strict=True)
        return gated(h, *(w(f"{at}{part}.weight", *shape) for part, shape in parts))

    def attention(raw: Raw, w: Tensors, at: str, h: torch.Tensor) -> torch.Tensor:
        nope, turning, value = (raw[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
        count, latent, eps = raw["num_attention_heads"], raw["kv_lora_rank"], raw["rms_norm_eps"]
        first, norm, second = names.queries
        q = linear(w, at + first, h, raw["q_lora_rank"])
        q = rms(q, w(f"{at}{norm}.weight", raw["q_lora_rank"]), eps)
        q = heads(linear(w, at + second, q, count * (nope + turning)), nope + turning)
        first, norm, second = names.keys
        kept, turn = linear(w, at + first, h, latent + turning).split([latent, turning], -1)
        kept = rms(kept, w(f"{at}{norm}.weight", latent), eps)
        kv = heads(linear(w, at + second, kept, count * (nope + value)), nope + value)
        rope = raw["rope_parameters"]
        turn = turned(turn[:, None], rope["rope_theta"], pairs=True).expand(-1, count, -1)
        q = torch.cat((q[..., :nope], turned(q[..., nope:], rope["rope_theta"], pairs=True)), -1)
        passed = torch.arange(len(h)) // rope["original_max_position_embeddings"]
        q = q * (1 + rope["llama_4_scaling_beta"] * passed.log1p())[:, None, None]
        return attend(q, torch.cat((kv[..., :nope], turn), -1), kv[..., nope:])

    def run(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
        dim, eps, inner = raw["hidden_size"], raw["rms_norm_eps"], raw["moe_intermediate_size"]
        x = F.embedding(ids, w(names.embed + ".weight", VOCAB, dim))
        for i in range(raw["num_hidden_layers"]):
            at = names.layer.format(i)
            h = rms(x, w(f"{at}{names.norms[0]}.weight", dim), eps)
            seen = attention(raw, w, f"{at}{names.attention}.", h)
            x = x + linear(w, f"{at}{names.attention}.{names.out}", seen, dim)
            h = rms(x, w(f"{at}{names.norms[1]}.weight", dim), eps)
            if i < raw["first_k_dense_replace"]:
                x = x + block(w, at + names.of_mlp, h, raw["intermediate_size"])
                continue
            at += names.of_moe
            scores = linear(w, at + "gate", h, raw["n_routed_experts"]).softmax(-1)
            shares = best(scores, raw["num_experts_per_tok"])
            shares = shares / shares.sum(-1, keepdim=True) * raw["routed_scaling_factor"]
            x = x + _sum(w, at, h, shares, inner, block)
            x = x + block(w, at + "shared_experts.", h, inner)
        return linear(w, names.head, rms(x, w(names.norm + ".weight", dim), eps), VOCAB)

    return run


def _sum(
    w: Tensors, at: str, h: torch.Tensor, shares: torch.Tensor, inner: int, block: Any
) -> torch.Tensor:
    return experts(h, shares, lambda e, h: block(w, f"{at}experts.{e}.", h, inner))


_MISTRAL = LLAMA | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 20,
    },
}
_OWN = _Names(
    embed="tok_embeddings",
    layer="layers.{}.",
    norms=("attention_norm", "ffn_norm"),
    attention="attention",
    queries=("wq_a", "q_a_norm", "wq_b"),
    keys=("wkv_a_with_mqa", "kv_a_norm", "wkv_b"),
    out="wo",
    of_mlp="feed_forward.",
    of_moe="",
    factors=("w1", "w3", "w2"),
    norm="norm",
    head="output",
)
_K2 = LLAMA | {"model_type": "k2_horizon", "head_dim": 16, "mlp_only_layers": [0, 1, 2]}
_K2_EXPERTS = _K2 | {
    "model_type": "xllm",
    "rope_head_dim": 8,
    "mlp_only_layers": [0],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "moe_gate_bias": True,
    "norm_topk_prob": True,
    "router_scaling_factor": 2.5,
}
LATER: Mapping[str, tuple[Raw, Run]] = MappingProxyType(
    {
        "k2-horizon": (_K2 | {"architectures": ["K2HorizonForCausalLM"]}, xllm),
        "mistral4": (
            _MISTRAL | {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"},
            mistral(_Names()),
        ),
        "mistral-large3": (
            _MISTRAL | {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "deepseek_v3"},
            mistral(_OWN),
        ),
        "nanbeige": (
            LLAMA
            | {
                "architectures": ["NanbeigeForCausalLM"],
                "model_type": "nanbeige",
                "num_hidden_layers": 2,
                "num_loops": 2,
            },
            nanbeige,
        ),
        "spark2.5": (
            LLAMA
            | {
                "architectures": ["Spark2_5ForCausalLM"],
                "model_type": "spark2_5",
                "hidden_act": "gelu",
                "head_dim": 24,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.25},
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
                },
            },
            spark,
        ),
        "xllm": (_K2_EXPERTS | {"architectures": ["XllmForCausalLM"]}, xllm),
    }
)
