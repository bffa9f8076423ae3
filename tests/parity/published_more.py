"""More published computations; see `published` and `published_models`.

Sources: the modelling files that came with the checkpoints of Phi-3-small, Step 3.5, XVERSE-MoE,
RWKV-5 and RWKV-6 (RWKV/rwkv-5-world, RWKV/rwkv-6-world), and arXiv:2404.05892.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from tests.parity.checkpoints import VOCAB
from tests.parity.published import Run, Tensors, attend, best, experts, gated, heads, rms, turned

Raw = dict[str, Any]


def phi3small(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    names = "hidden_size", "num_attention_heads", "num_key_value_heads"
    dim, count, groups = (raw[name] for name in names)
    size, inner, times = dim // count, raw["ff_intermediate_size"], count // groups
    scale, eps = raw["mup_attn_multiplier"] / size, raw["layer_norm_epsilon"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (dim,), w(name + ".weight", dim), w(name + ".bias", dim), eps)

    def linear(name: str, x: torch.Tensor, rows: int) -> torch.Tensor:
        return F.linear(x, w(name + ".weight", rows, x.shape[-1]), w(name + ".bias", rows))

    table = w("model.embed_tokens.weight", VOCAB, dim)
    x = F.embedding(ids, table) * raw["mup_embedding_multiplier"]
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h, rows = norm(at + "input_layernorm", x), (count + 2 * groups) * size
        h = linear(at + "self_attn.query_key_value", h, rows)
        grouped = h.view(len(ids), groups, times + 2, size)
        q = turned(grouped[:, :, :times].flatten(1, 2), raw["rope_embedding_base"])
        k, v = turned(grouped[:, :, times], raw["rope_embedding_base"]), grouped[:, :, times + 1]
        dense = (i + 1) % raw["dense_attention_every_n_layers"] == 0
        x = x + linear(at + "self_attn.dense", _seen(raw, q, k, v, scale, dense=dense), dim)
        h = linear(at + "mlp.up_proj", norm(at + "post_attention_layernorm", x), 2 * inner)
        gate, up = h[:, ::2].clamp(max=raw["gegelu_limit"]), h[:, 1::2]
        up = up.clamp(-raw["gegelu_limit"], raw["gegelu_limit"])
        x = x + linear(at + "mlp.down_proj", gate * torch.sigmoid(1.702 * gate) * (up + 1), dim)
    return F.linear(norm("model.final_layernorm", x), table) / raw["mup_width_multiplier"]


def _seen(
    raw: Raw, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, dense: bool
) -> torch.Tensor:
    """Attention to near blocks, and to every so many blocks before them, by head."""
    count, length = q.shape[1], len(q)
    block = torch.arange(length) // raw["blocksparse_block_size"]
    stride = raw["blocksparse_vert_stride"]
    out = []
    for head in range(count):
        group = head // (count // k.shape[1])
        scores = q[:, head] @ k[:, group].T * scale
        near = block[:, None] - block < raw["blocksparse_num_local_blocks"]
        far = (block + head * max(1, stride // count) + 1) % stride == 0
        shown = torch.ones(length, length, dtype=torch.bool).tril()
        shown = shown if dense else shown & (near | far)
        out.append(scores.masked_fill(~shown, -math.inf).softmax(-1) @ v[:, group])
    return torch.cat(out, -1)


def step(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, size, eps = raw["hidden_size"], raw["head_dim"], raw["rms_norm_eps"]
    kv, inner = raw["num_attention_groups"] * size, raw["moe_intermediate_size"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, 1 + w(name + ".weight", x.shape[-1]), eps)

    def linear(name: str, x: torch.Tensor, rows: int) -> torch.Tensor:
        return F.linear(x, w(name + ".weight", rows, x.shape[-1]))

    def clamped(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
        limit = limit or math.inf
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    def mlp(name: str, x: torch.Tensor, columns: int, limit: float) -> torch.Tensor:
        gate, up = (linear(f"{name}.{part}_proj", x, columns) for part in ("gate", "up"))
        return linear(name + ".down_proj", clamped(gate, up, limit), dim)

    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    for i in range(raw["num_hidden_layers"]):
        at, near = f"model.layers.{i}.", raw["layer_types"][i] == "sliding_attention"
        count = raw["attention_other_setting" if near else "num_attention_heads"]
        count = count["num_attention_heads"] if near else count
        h = norm(at + "input_layernorm", x)
        rows = {"q": count * size, "k": kv, "v": kv}
        q, k, v = (heads(linear(f"{at}self_attn.{p}_proj", h, n), size) for p, n in rows.items())
        base, part = raw["rope_theta"][i], raw["partial_rotary_factors"][i]
        q = turned(norm(at + "self_attn.q_norm", q), base, part)
        k = turned(norm(at + "self_attn.k_norm", k), base, part)
        window = raw["sliding_window"] if near else len(ids)
        seen = heads(within(q, k, v, window), size)
        seen = seen * linear(at + "self_attn.g_proj", h, count).sigmoid()[..., None]
        x = x + linear(at + "self_attn.o_proj", seen.flatten(1), dim)
        h = norm(at + "post_attention_layernorm", x)
        shared = raw["swiglu_limits_shared"][i]
        if str(i) not in raw["moe_layers_enum"].split(","):
            x = x + mlp(at + "mlp", h, raw["intermediate_size"], shared)
            continue
        x = x + mlp(at + "share_expert", h, raw["share_expert_dim"], shared)
        x = x + _step_experts(raw, w, at + "moe.", h, raw["swiglu_limits"][i], clamped, inner)
    return linear("lm_head", norm("model.norm", x), VOCAB)


def _step_experts(
    raw: Raw, w: Tensors, at: str, h: torch.Tensor, limit: float, clamped: Any, inner: int
) -> torch.Tensor:
    count, dim = raw["moe_num_experts"], h.shape[-1]
    scores = F.linear(h, w(at + "gate.weight", count, dim)).sigmoid()
    shares = best(scores, raw["moe_top_k"], scores + w(at + "router_bias", count))
    shares = shares / shares.sum(-1, keepdim=True) * raw["moe_router_scaling_factor"]
    gates, ups = (w(f"{at}{part}_proj.weight", count, inner, dim) for part in ("gate", "up"))
    downs = w(at + "down_proj.weight", count, dim, inner)

    def one(e: int, x: torch.Tensor) -> torch.Tensor:
        return F.linear(clamped(F.linear(x, gates[e]), F.linear(x, ups[e]), limit), downs[e])

    return experts(h, shares, one)


def within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Attention to the newest `window` tokens. Shape: (T, N H)."""
    times, at = q.shape[1] // k.shape[1], torch.arange(len(q))
    k, v = (x.repeat_interleave(times, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    apart = at[:, None] - at
    scores = scores.masked_fill((apart < 0) | (apart >= window), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def xverse_moe(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, eps, inner, size = raw["hidden_size"], raw["rms_norm_eps"], raw["intermediate_size"], 16

    def mlp(name: str, x: torch.Tensor, columns: int) -> torch.Tensor:
        gate, up = (w(f"{name}.{part}_proj.weight", columns, dim) for part in ("gate", "up"))
        return gated(x, gate, up, w(name + ".down_proj.weight", dim, columns))

    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = rms(x, w(at + "input_layernorm.weight", dim), eps)
        q, k, v = (
            heads(F.linear(h, w(f"{at}self_attn.{part}_proj.weight", dim, dim)), size)
            for part in "qkv"
        )
        h = attend(turned(q, 10_000.0), turned(k, 10_000.0), v)
        x = x + F.linear(h, w(at + "self_attn.o_proj.weight", dim, dim))
        h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
        scores = F.linear(h, w(at + "mlp.router.weight", raw["num_experts"], dim)).softmax(-1)
        shares = best(scores, raw["moe_top_k"])
        x = x + mlp(at + "mlp.shared_experts", h, inner * raw["num_shared_experts"])
        x = x + experts(h, shares, lambda e, x, at=at: mlp(f"{at}mlp.experts.{e}", x, inner))
    x = rms(x, w("model.norm.weight", dim), eps)
    return F.linear(x, w("lm_head.weight", VOCAB, dim))


def rwkv(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """RWKV-5 and RWKV-6."""
    dim, inner = raw["hidden_size"], raw["intermediate_size"]
    sixth = raw["architectures"] == ["Rwkv6ForCausalLM"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (dim,), w(name + ".weight", dim), w(name + ".bias", dim), 1e-5)

    def linear(name: str, x: torch.Tensor, rows: int) -> torch.Tensor:
        return F.linear(x, w(name + ".weight", rows, x.shape[-1]))

    def mixed(name: str, x: torch.Tensor, letter: str) -> torch.Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:-1]
        if sixth:
            return x + (before - x) * w(f"{name}.time_maa_{letter}", 1, 1, dim)[0]
        share = w(f"{name}.time_mix_{'key' if letter == 'k' else 'receptance'}", 1, 1, dim)[0]
        return x * share + before * (1 - share)

    x = norm("rwkv.blocks.0.pre_ln", F.embedding(ids, w("rwkv.embeddings.weight", VOCAB, dim)))
    for i in range(raw["num_hidden_layers"]):
        at = f"rwkv.blocks.{i}."
        mix = _rwkv6_inputs if sixth else _rwkv5_inputs
        given = raw, w, at + "attention."
        x = x + _wkv(*given, *mix(*given, norm(at + "ln1", x)))
        h, name = norm(at + "ln2", x), at + "feed_forward"
        key = linear(name + ".key", mixed(name, h, "k"), inner).relu().square()
        opened = linear(name + ".receptance", mixed(name, h, "r"), dim).sigmoid()
        x = x + opened * linear(name + ".value", key, dim)
    return linear("head", norm("rwkv.ln_out", x), VOCAB)


def _rwkv5_inputs(raw: Raw, w: Tensors, at: str, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    dim, before = x.shape[-1], F.pad(x, (0, 0, 1, 0))[:-1]
    found = {}
    for word in ("key", "value", "receptance", "gate"):
        share = w(f"{at}time_mix_{word}", 1, 1, dim)[0]
        found[word] = x * share + before * (1 - share)
    size = raw["head_size"]
    return found, w(at + "time_decay", dim // size, size).flatten().expand(len(x), -1)


def _rwkv6_inputs(raw: Raw, w: Tensors, at: str, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    dim, change = x.shape[-1], F.pad(x, (0, 0, 1, 0))[:-1] - x
    low = x + change * w(at + "time_maa_x", 1, 1, dim)[0]
    low = torch.tanh(low @ w(at + "time_maa_w1", dim, 160)).view(len(x), 5, 32).transpose(0, 1)
    more = torch.bmm(low, w(at + "time_maa_w2", 5, 32, dim))
    letters = {"w": "w", "k": "key", "v": "value", "r": "receptance", "g": "gate"}
    found = {
        word: x + change * (w(f"{at}time_maa_{letter}", 1, 1, dim)[0] + more[place])
        for place, (letter, word) in enumerate(letters.items())
    }
    decay = torch.tanh(found["w"] @ w(at + "time_decay_w1", dim, 64))
    decay = decay @ w(at + "time_decay_w2", 64, dim)
    return found, w(at + "time_decay", 1, 1, dim)[0] + decay


def _wkv(raw: Raw, w: Tensors, at: str, given: Any, decay: torch.Tensor) -> torch.Tensor:
    dim, size = raw["hidden_size"], raw["head_size"]
    r, k, v, g = (
        F.linear(given[word], w(f"{at}{word}.weight", dim, dim))
        for word in ("receptance", "key", "value", "gate")
    )
    fade = torch.exp(-torch.exp(decay))
    r, k, v, fade = (heads(part, size) for part in (r, k, v, fade))
    first = w(at + "time_faaaa", dim // size, size)
    state, out = r.new_zeros(dim // size, size, size), []
    for t in range(len(r)):
        now = k[t][..., None] * v[t][:, None]
        out.append((r[t][:, None] @ (first[..., None] * now + state))[:, 0])
        state = fade[t][..., None] * state + now
    whole = torch.stack(out).flatten(1) / raw["head_size_divisor"]
    weight, bias = w(at + "ln_x.weight", dim), w(at + "ln_x.bias", dim)
    whole = F.group_norm(whole, dim // size, weight, bias, 1e-5)
    return F.linear(whole * F.silu(g), w(at + "output.weight", dim, dim))


_SIZES: Raw = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = _SIZES | {
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_RWKV = _SIZES | {"head_size": 16, "head_size_divisor": 8, "intermediate_size": 96}
STEP: Raw = _LLAMA | {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "head_dim": 16,
    "intermediate_size": 112,
    "num_attention_groups": 2,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 12,
    "rope_theta": [5_000_000.0, 10_000.0, 10_000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0],
    "use_head_wise_attn_gate": True,
    "moe_layers_enum": "1,2",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "moe_router_scaling_factor": 3.0,
    "share_expert_dim": 32,
    "swiglu_limits": [0.0, 0.0, 0.05],
    "swiglu_limits_shared": [0.1, 0.0, 0.08],
}
MORE: Mapping[str, tuple[Raw, Run]] = MappingProxyType(
    {
        "phi3-small": (
            _SIZES
            | {
                "architectures": ["Phi3SmallForCausalLM"],
                "model_type": "phi3small",
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "ff_intermediate_size": 112,
                "gegelu_limit": 0.5,
                "hidden_act": "gegelu",
                "layer_norm_epsilon": 1e-5,
                "mup_attn_multiplier": 1.5,
                "mup_embedding_multiplier": 3.0,
                "mup_use_scaling": True,
                "mup_width_multiplier": 2.0,
                "rope_embedding_base": 1e6,
                "rope_position_scale": 1.0,
                "dense_attention_every_n_layers": 2,
                "blocksparse_block_size": 4,
                "blocksparse_num_local_blocks": 2,
                "blocksparse_vert_stride": 3,
                "dummy_token_indices": [],
            },
            phi3small,
        ),
        "rwkv5": (
            _RWKV | {"architectures": ["Rwkv5ForCausalLM"], "model_type": "rwkv5"},
            rwkv,
        ),
        "rwkv6": (
            _RWKV | {"architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6"},
            rwkv,
        ),
        "step3.5": (STEP, step),
        "xverse-moe": (
            _LLAMA
            | {
                "architectures": ["XverseMoeForCausalLM"],
                "model_type": "xverse",
                "intermediate_size": 24,
                "num_experts": 8,
                "moe_top_k": 2,
                "num_shared_experts": 2,
            },
            xverse_moe,
        ),
    }
)
