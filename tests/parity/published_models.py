"""The published computations that `published` speaks of, one function a family, and tiny configs.

Sources: the modelling files that came with the checkpoints (Qwen 1, ChatGLM 2 and 3, InternLM,
Baichuan, EXAONE 3, Orion, XVERSE, Ling, Solar Pro, DeciLM and Nemotron NAS) and DeepSeek 1;
model.py of xai-org/grok-1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from tests.parity.checkpoints import VOCAB
from tests.parity.published import (
    Published,
    Run,
    Tensors,
    attend,
    best,
    experts,
    gated,
    heads,
    rms,
    turned,
)
from tests.parity.published_later import LATER
from tests.parity.published_more import MORE
from tests.parity.published_rwkv import RWKV7, rwkv7
from tests.parity.published_xlstm import XLSTM, xlstm

Raw = dict[str, Any]

SIZES: Raw = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Names:
    """A family's names of Llama's tensors; `{}` is the layer."""

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    first_norm: str = "input_layernorm"
    queries: str = "self_attn.q_proj"
    keys: str = "self_attn.k_proj"
    values: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    second_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True)
class Switches:
    """How a family differs from Llama, apart from names."""

    attention_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    layer_norm: bool = False
    embed_scale: float = 1.0
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    slopes: tuple[float, ...] = ()
    unit_head: bool = False
    base: float = 10_000.0
    layers: str = "num_hidden_layers"
    eps: str = "rms_norm_eps"


def llama(names: Names, how: Switches) -> Run:
    """Llama's computation with names and switches."""

    def run(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
        dim, inner = raw["hidden_size"], raw["intermediate_size"]
        size = dim // raw["num_attention_heads"]
        kv = raw.get("num_key_value_heads", raw["num_attention_heads"]) * size

        def linear(name: str, x: torch.Tensor, rows: int, *, bias: bool) -> torch.Tensor:
            b = w(name + ".bias", rows) if bias else None
            return F.linear(x, w(name + ".weight", rows, x.shape[-1]), b)

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            weight = w(name + ".weight", dim)
            if how.layer_norm:
                return F.layer_norm(x, (dim,), weight, w(name + ".bias", dim), raw[how.eps])
            return rms(x, weight, raw[how.eps])

        x = F.embedding(ids, w(names.embed + ".weight", VOCAB, dim)) * how.embed_scale
        for i in range(raw[how.layers]):
            at = names.layer.format(i)
            h = norm(at + names.first_norm, x)
            q, k, v = (
                heads(linear(at + part, h, rows, bias=how.attention_bias), size)
                for part, rows in ((names.queries, dim), (names.keys, kv), (names.values, kv))
            )
            if not how.slopes:
                q, k = turned(q, how.base), turned(k, how.base)
            slopes = torch.tensor(how.slopes) if how.slopes else None
            h = attend(q, k, v, slopes=slopes)
            x = x + linear(at + names.out, h, dim, bias=how.out_bias) * how.branch_scale
            h = norm(at + names.second_norm, x)
            gate = F.silu(linear(at + names.gate, h, inner, bias=how.mlp_bias))
            h = gate * linear(at + names.up, h, inner, bias=how.mlp_bias)
            x = x + linear(at + names.down, h, dim, bias=how.mlp_bias) * how.branch_scale
        head = w(names.head + ".weight", VOCAB, dim)
        head = F.normalize(head) if how.unit_head else head
        return F.linear(norm(names.norm, x), head) * how.logit_scale

    return run


def joined(run: Run, joined: Callable[[Tensors, Raw], Callable[..., torch.Tensor | None]]) -> Run:
    """`run` with tensors that `joined` cuts out of those of the checkpoint."""

    def with_parts(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
        part = joined(w, raw)

        def tensor(name: str, *shape: int) -> torch.Tensor:
            found = part(name, *shape)
            return w(name, *shape) if found is None else found

        return run(raw, tensor, ids)

    return with_parts


def _packed(w: Tensors, raw: Raw) -> Callable[..., torch.Tensor | None]:
    """Baichuan: queries, keys and values below each other."""

    def part(name: str, *shape: int) -> torch.Tensor | None:
        for number, letter in enumerate("qkv"):
            if f"self_attn.{letter}_proj" in name:
                whole = w(name.replace(f"{letter}_proj", "W_pack"), 3 * shape[0], *shape[1:])
                return whole.chunk(3)[number]
        return None

    return part


def _grouped(w: Tensors, raw: Raw) -> Callable[..., torch.Tensor | None]:
    """InternLM 2: the queries, key and value of each group lie together."""
    groups, size = raw["num_key_value_heads"], raw["hidden_size"] // raw["num_attention_heads"]
    each = raw["num_attention_heads"] // groups

    def part(name: str, *shape: int) -> torch.Tensor | None:
        for letter, rows in (("q", slice(each)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
            if f"attention.w{letter}." in name:
                whole = name.replace(f"w{letter}.", "wqkv.")
                stored = w(whole, groups * (each + 2) * size, shape[-1])
                return stored.unflatten(0, (groups, each + 2, size))[:, rows].flatten(0, 2)
        return None

    return part


EXAONE = Names(
    embed="transformer.wte",
    layer="transformer.h.{}.",
    first_norm="ln_1",
    queries="attn.attention.q_proj",
    keys="attn.attention.k_proj",
    values="attn.attention.v_proj",
    out="attn.attention.out_proj",
    second_norm="ln_2",
    gate="mlp.c_fc_0",
    up="mlp.c_fc_1",
    down="mlp.c_proj",
    norm="transformer.ln_f",
)
INTERNLM2 = Names(
    embed="model.tok_embeddings",
    first_norm="attention_norm",
    queries="attention.wq",
    keys="attention.wk",
    values="attention.wv",
    out="attention.wo",
    second_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    head="output",
)


def qwen(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Qwen 1, its base and its queries as at the longest text (`max_position_embeddings`)."""
    dim, size, inner = raw["hidden_size"], raw["kv_channels"], raw["intermediate_size"] // 2
    trained, longest, eps = raw["seq_length"], raw["max_position_embeddings"], 1e-6
    base = raw["rotary_emb_base"]
    if raw["use_dynamic_ntk"]:
        times = max(2 ** math.ceil(math.log(longest / trained, 2) + 1) - 1, 1)
        base = base * times ** (size / (size - 2))
    grown = torch.tensor([max(math.log(i, trained), 1.0) for i in range(1, len(ids) + 1)])
    x = F.embedding(ids, w("transformer.wte.weight", VOCAB, dim))
    for i in range(raw["num_hidden_layers"]):
        at = f"transformer.h.{i}."
        h = rms(x, w(at + "ln_1.weight", dim), eps)
        joined = F.linear(
            h, w(at + "attn.c_attn.weight", 3 * dim, dim), w(at + "attn.c_attn.bias", 3 * dim)
        )
        q, k, v = (heads(part, size) for part in joined.chunk(3, -1))
        q, k = turned(q, base), turned(k, base)
        if raw["use_logn_attn"]:
            q = q * grown[:, None, None]
        x = x + F.linear(attend(q, k, v), w(at + "attn.c_proj.weight", dim, dim))
        h = rms(x, w(at + "ln_2.weight", dim), eps)
        up = F.linear(h, w(at + "mlp.w1.weight", inner, dim))
        gate = F.silu(F.linear(h, w(at + "mlp.w2.weight", inner, dim)))
        x = x + F.linear(up * gate, w(at + "mlp.c_proj.weight", dim, inner))
    x = rms(x, w("transformer.ln_f.weight", dim), eps)
    return F.linear(x, w("lm_head.weight", VOCAB, dim))


def chatglm(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, size, inner = raw["hidden_size"], raw["kv_channels"], raw["ffn_hidden_size"]
    kv, eps = raw["multi_query_group_num"] * size, raw["layernorm_epsilon"]
    base = 10_000.0 * raw.get("rope_ratio", 1)
    x = F.embedding(ids, w("transformer.embedding.word_embeddings.weight", VOCAB, dim))
    for i in range(raw["num_layers"]):
        at = f"transformer.encoder.layers.{i}."
        h = rms(x, w(at + "input_layernorm.weight", dim), eps)
        name = at + "self_attention.query_key_value."
        rows = dim + 2 * kv
        joined = F.linear(h, w(name + "weight", rows, dim), w(name + "bias", rows))
        q, k, v = (heads(part, size) for part in joined.split([dim, kv, kv], -1))
        q, k = (turned(part, base, 0.5, pairs=True) for part in (q, k))
        x = x + F.linear(attend(q, k, v), w(at + "self_attention.dense.weight", dim, dim))
        h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
        gate, up = F.linear(h, w(at + "mlp.dense_h_to_4h.weight", 2 * inner, dim)).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, w(at + "mlp.dense_4h_to_h.weight", dim, inner))
    x = rms(x, w("transformer.encoder.final_layernorm.weight", dim), eps)
    return F.linear(x, w("transformer.output_layer.weight", VOCAB, dim))


def _mlp(w: Tensors, name: str, x: torch.Tensor, inner: int) -> torch.Tensor:
    dim = x.shape[-1]
    gate, up = (w(f"{name}.{part}_proj.weight", inner, dim) for part in ("gate", "up"))
    return gated(x, gate, up, w(name + ".down_proj.weight", dim, inner))


def _mixture(raw: Raw, w: Tensors, name: str, x: torch.Tensor, shares: torch.Tensor) -> Any:
    """Chosen experts, and those that every token visits."""
    inner = raw["moe_intermediate_size"]
    out = experts(x, shares, lambda e, x: _mlp(w, f"{name}.experts.{e}", x, inner))
    shared = raw.get("n_shared_experts") or raw.get("num_shared_experts")
    return out + _mlp(w, name + ".shared_experts", x, inner * shared) if shared else out


def deepseek(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, eps, size = raw["hidden_size"], raw["rms_norm_eps"], 16
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
        if i < raw["first_k_dense_replace"]:
            x = x + _mlp(w, at + "mlp", h, raw["intermediate_size"])
            continue
        scores = F.linear(h, w(at + "mlp.gate.weight", raw["n_routed_experts"], dim)).softmax(-1)
        x = x + _mixture(raw, w, at + "mlp", h, best(scores, raw["num_experts_per_tok"]))
    x = rms(x, w("model.norm.weight", dim), eps)
    return F.linear(x, w("lm_head.weight", VOCAB, dim))


def bailing(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Ling 1 (softmax, rows of the head of length one) and 2 (sigmoids in groups, head norms)."""
    second = raw["architectures"] != ["BailingMoeForCausalLM"]  # LLaDA 2, too, which fills blocks
    block = raw.get("block_size", 1)
    dim, eps, size, count = raw["hidden_size"], raw["rms_norm_eps"], 16, raw["num_experts"]
    kv = raw["num_key_value_heads"] * size
    x = F.embedding(ids, w("model.word_embeddings.weight", VOCAB, dim))
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = rms(x, w(at + "input_layernorm.weight", dim), eps)
        joined = F.linear(h, w(at + "attention.query_key_value.weight", dim + 2 * kv, dim))
        q, k, v = (heads(part, size) for part in joined.split([dim, kv, kv], -1))
        if second:
            q = rms(q, w(at + "attention.query_layernorm.weight", size), eps)
            k = rms(k, w(at + "attention.key_layernorm.weight", size), eps)
        part = raw.get("partial_rotary_factor", 1.0)
        q, k = (turned(x, raw["rope_theta"], part) for x in (q, k))
        h = attend(q, k, v, block=block)
        x = x + F.linear(h, w(at + "attention.dense.weight", dim, dim))
        h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
        if i < raw["first_k_dense_replace"]:
            x = x + _mlp(w, at + "mlp", h, raw["intermediate_size"])
            continue
        logits = F.linear(h, w(at + "mlp.gate.weight", count, dim))
        if second:
            scores = logits.sigmoid()
            by = scores + w(at + "mlp.gate.expert_bias", count)
            groups = heads(by, count // raw["n_group"])
            kept = groups.topk(2, -1).values.sum(-1).topk(raw["topk_group"], -1).indices
            inside = torch.zeros(groups.shape[:2]).scatter(1, kept, 1.0)
            by = groups.masked_fill(inside[..., None] == 0, -math.inf).flatten(1)
            shares = best(scores, raw["num_experts_per_tok"], by)
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
            shares = shares * raw["routed_scaling_factor"]
        else:
            shares = best(logits.softmax(-1), raw["num_experts_per_tok"])
            shares = shares / shares.sum(-1, keepdim=True)
        x = x + _mixture(raw, w, at + "mlp", h, shares)
    x = rms(x, w("model.norm.weight", dim), eps)
    head = w("lm_head.weight", VOCAB, dim)
    return F.linear(x, F.normalize(head) if raw.get("norm_head") else head)


def grok(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, eps, size = raw["hidden_size"], raw["rms_norm_eps"], 16
    kv, inner, count = raw["num_key_value_heads"] * size, raw["intermediate_size"], 8
    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    x = x * raw["embedding_multiplier_scale"]
    for i in range(raw["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = rms(x, w(at + "pre_attn_norm.scale", dim), eps)
        q, k, v = (
            heads(F.linear(h, w(f"{at}attn.{part}_proj.weight", rows, dim)), size)
            for part, rows in (("q", dim), ("k", kv), ("v", kv))
        )
        scale, cap = raw["attn_output_multiplier"], raw["max_attn_value"]
        h = attend(turned(q, 10_000.0), turned(k, 10_000.0), v, scale=scale, cap=cap)
        h = F.linear(h, w(at + "attn.o_proj.weight", dim, dim))
        x = x + rms(h, w(at + "post_attn_norm.scale", dim), eps)
        h = rms(x, w(at + "pre_moe_norm.scale", dim), eps)
        scores = F.linear(h, w(at + "moe_block.gate.weight", count, dim)).softmax(-1)

        def one(e: int, x: torch.Tensor, at: str = at) -> torch.Tensor:
            name = f"{at}moe_block.experts.{e}."
            gate, up = (w(f"{name}{n}.weight", inner, dim) for n in ("linear", "linear_v"))
            h = F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up)
            return F.linear(h, w(name + "linear_1.weight", dim, inner))

        h = experts(h, best(scores, raw["num_experts_per_tok"]), one)
        x = x + rms(h, w(at + "post_moe_norm.scale", dim), eps)
    x = rms(x, w("model.norm.scale", dim), eps)
    return F.linear(x, w("lm_head.weight", VOCAB, dim)) * raw["output_multiplier_scale"]


def _llama_layer(
    w: Tensors, at: str, x: torch.Tensor, kv: int, inner: int, *, parts: str = "am"
) -> torch.Tensor:
    """A layer of Llama with heads of 16 columns; `parts`: attention, mlp, or L and M for matrices.

    L stands in the place of attention, M in that of the mlp.
    """
    dim, eps = x.shape[-1], 1e-6
    if "a" in parts or "L" in parts:
        h = rms(x, w(at + "input_layernorm.weight", dim), eps)
        if "L" in parts:
            x = x + F.linear(h, w(at + "self_attn.linear_attn.weight", dim, dim))
        else:
            q, k, v = (
                heads(F.linear(h, w(f"{at}self_attn.{part}_proj.weight", rows, dim)), 16)
                for part, rows in (("q", dim), ("k", kv), ("v", kv))
            )
            h = attend(turned(q, 10_000.0), turned(k, 10_000.0), v)
            x = x + F.linear(h, w(at + "self_attn.o_proj.weight", dim, dim))
    if "m" in parts or "M" in parts:
        h = rms(x, w(at + "post_attention_layernorm.weight", dim), eps)
        if "M" in parts:
            return x + F.linear(h, w(at + "mlp.linear_mlp.weight", dim, dim))
        x = x + _mlp(w, at + "mlp", h, inner)
    return x


def solar(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    dim, share = raw["hidden_size"], raw["bskcn_tv"][1]
    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    kept: list[Any] = [None, None]
    for i in range(raw["num_hidden_layers"]):
        for place, (keep, mix) in enumerate((("1", "3"), ("2", "4"))):
            if i in raw["bskcn_" + keep]:
                kept[place] = x
            if i in raw["bskcn_" + mix]:
                x = kept[place] * share + x * (1 - share)
        at, inner = f"model.layers.{i}.", raw["intermediate_size"]
        x = _llama_layer(w, at, x, 16 * raw["num_key_value_heads"], inner)
    x = rms(x, w("model.norm.weight", dim), raw["rms_norm_eps"])
    return F.linear(x, w("lm_head.weight", VOCAB, dim))


def nas(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """Layers of Llama that differ in key heads and columns, or lack a part."""
    dim, count = raw["hidden_size"], raw["num_attention_heads"]
    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    for i, block in enumerate(raw["block_configs"]):
        attention, ffn = block["attention"], block["ffn"]
        parts = "" if attention["no_op"] else "L" if attention["replace_with_linear"] else "a"
        parts += "" if ffn["no_op"] else "M" if ffn["replace_with_linear"] else "m"
        kv = 16 * count // attention["n_heads_in_group"] if "a" in parts else 0
        inner = 0
        if "m" in parts:
            inner = int(2 * ffn["ffn_mult"] * dim / 3)
            inner += -inner % 256
        x = _llama_layer(w, f"model.layers.{i}.", x, kv, inner, parts=parts)
    x = rms(x, w("model.norm.weight", dim), raw["rms_norm_eps"])
    return F.linear(x, w("lm_head.weight", VOCAB, dim))


def decilm(raw: Raw, w: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """DeciLM 7B: layers differ in key heads only."""
    dim = raw["hidden_size"]
    x = F.embedding(ids, w("model.embed_tokens.weight", VOCAB, dim))
    for i, groups in enumerate(raw["num_key_value_heads_per_layer"]):
        x = _llama_layer(w, f"model.layers.{i}.", x, 16 * groups, raw["intermediate_size"])
    x = rms(x, w("model.norm.weight", dim), raw["rms_norm_eps"])
    return F.linear(x, w("lm_head.weight", VOCAB, dim))


def _block(size: int | None, times: float | None, **changes: Any) -> Raw:
    plain = {"no_op": False, "replace_with_linear": False}
    return {
        "attention": {"n_heads_in_group": size} | plain | changes.get("attention", {}),
        "ffn": {"ffn_mult": times} | plain | changes.get("ffn", {}),
    }


@dataclass(frozen=True)
class Family:
    """A config.json and the computation that it describes."""

    raw: Raw
    run: Run

    def make(self, seed: int) -> Published:
        return Published(self.raw, self.run, seed)


def _family(architecture: str, run: Run, without: tuple[str, ...] = (), **changes: Any) -> Family:
    raw = {name: value for name, value in SIZES.items() if name not in without}
    return Family(raw | {"architectures": [architecture]} | changes, run)


def _renamed(architecture: str, names: Names, **how: Any) -> Family:
    return _family(architecture, llama(names, Switches(**how)))


_PLAIN = Names()
_SLOPES = tuple(2.0 ** -(8 / 4 * (i + 1)) for i in range(4))
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_BAILING = _EXPERTS | {"num_experts": 8, "num_shared_experts": 1, "rope_theta": 600_000.0}
_MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32}

PUBLISHED: Mapping[str, Family] = MappingProxyType(
    {
        "aquila": _renamed("AquilaForCausalLM", _PLAIN),
        "baichuan": _family(
            "BaichuanForCausalLM",
            joined(llama(_PLAIN, Switches()), _packed),
            ("num_key_value_heads", "max_position_embeddings"),
            model_max_length=256,
        ),
        "baichuan-13b": _family(
            "BaichuanForCausalLM",
            joined(llama(_PLAIN, Switches(slopes=_SLOPES)), _packed),
            ("num_key_value_heads", "max_position_embeddings"),
            model_max_length=256,
            position_embedding="ALIBI",
        ),
        "baichuan1": _family(
            "BaiChuanForCausalLM",
            joined(llama(_PLAIN, Switches()), _packed),
            ("num_key_value_heads",),
        ),
        "bailing": _family(
            "BailingMoeForCausalLM",
            bailing,
            **_BAILING,
            first_k_dense_replace=0,
            norm_topk_prob=True,
            norm_head=True,
        ),
        "bailing2": _family(
            "BailingMoeV2ForCausalLM",
            bailing,
            **_BAILING,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            partial_rotary_factor=0.5,
            use_qk_norm=True,
        ),
        "chatglm": Family(
            {
                "architectures": ["ChatGLMModel"],
                "model_type": "chatglm",
                "num_layers": 3,
                "hidden_size": 64,
                "ffn_hidden_size": 112,
                "kv_channels": 16,
                "num_attention_heads": 4,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "padded_vocab_size": VOCAB,
                "seq_length": 256,
                "layernorm_epsilon": 1e-5,
                "rmsnorm": True,
                "post_layer_norm": True,
                "add_bias_linear": False,
                "add_qkv_bias": True,
                "eos_token_id": 2,
                "apply_residual_connection_post_layernorm": False,
                "original_rope": True,
            },
            chatglm,
        ),
        "decilm": _family(
            "DeciLMForCausalLM",
            decilm,
            ("num_key_value_heads",),
            num_key_value_heads_per_layer=[4, 1, 2],
        ),
        "deepseek": _family(
            "DeepseekForCausalLM",
            deepseek,
            ("num_key_value_heads",),
            **_EXPERTS,
            n_routed_experts=8,
            n_shared_experts=2,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            norm_topk_prob=False,
            scoring_func="softmax",
        ),
        "exaone": Family(
            {n: v for n, v in SIZES.items() if n not in ("rms_norm_eps", "num_hidden_layers")}
            | {
                "architectures": ["ExaoneForCausalLM"],
                "num_layers": 3,
                "layer_norm_epsilon": 1e-5,
                "activation_function": "silu",
            },
            llama(EXAONE, Switches(layers="num_layers", eps="layer_norm_epsilon")),
        ),
        "glm-4-9b": Family(
            {
                "architectures": ["ChatGLMForConditionalGeneration"],
                "model_type": "chatglm",
                "num_layers": 3,
                "hidden_size": 64,
                "ffn_hidden_size": 112,
                "kv_channels": 16,
                "num_attention_heads": 4,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "padded_vocab_size": VOCAB,
                "seq_length": 256,
                "layernorm_epsilon": 1.5625e-07,
                "rmsnorm": True,
                "post_layer_norm": True,
                "add_bias_linear": False,
                "add_qkv_bias": True,
                "rope_ratio": 500,
                "eos_token_id": [2],
                "tie_word_embeddings": False,
            },
            chatglm,
        ),
        "grok1": _family(
            "Grok1ModelForCausalLM",
            grok,
            num_experts=8,
            num_experts_per_tok=2,
            embedding_multiplier_scale=2.5,
            output_multiplier_scale=0.57735,
            attn_output_multiplier=0.25,
            max_attn_value=3.0,
        ),
        "internlm": _family(
            "InternLMForCausalLM",
            llama(_PLAIN, Switches(attention_bias=True, out_bias=True)),
            ("num_key_value_heads",),
            bias=True,
        ),
        "internlm2": _family(
            "InternLM2ForCausalLM", joined(llama(INTERNLM2, Switches()), _grouped), bias=False
        ),
        "internlm3": _family(
            "InternLM3ForCausalLM",
            llama(_PLAIN, Switches(attention_bias=True)),
            qkv_bias=True,
            bias=False,
        ),
        "mimo": _renamed("MiMoForCausalLM", _PLAIN, attention_bias=True),
        "minicpm": _family(
            "MiniCPMForCausalLM",
            llama(
                _PLAIN,
                Switches(embed_scale=12, branch_scale=1.4 / math.sqrt(3), logit_scale=0.5),
            ),
            **_MINICPM,
        ),
        "nemotron-nas": _family(
            "DeciLMForCausalLM",
            nas,
            ("num_key_value_heads", "intermediate_size"),
            num_hidden_layers=5,
            block_configs=[
                _block(2, 1.5),
                _block(None, 6.5, attention={"no_op": True}),
                _block(4, None, ffn={"no_op": True}),
                _block(None, 1.5, attention={"replace_with_linear": True}),
                _block(1, None, ffn={"replace_with_linear": True}),
            ],
        ),
        "orion": _renamed("OrionForCausalLM", _PLAIN, layer_norm=True),
        "qwen": Family(
            {n: v for n, v in SIZES.items() if n not in ("num_key_value_heads", "rms_norm_eps")}
            | {
                "architectures": ["QWenLMHeadModel"],
                "model_type": "qwen",
                "kv_channels": 16,
                "intermediate_size": 224,
                "layer_norm_epsilon": 1e-6,
                "seq_length": 48,
                "rotary_emb_base": 10000,
                "rotary_pct": 1.0,
                "no_bias": True,
                "use_dynamic_ntk": True,
                "use_logn_attn": True,
                "scale_attn_weights": True,
            },
            qwen,
        ),
        "rwkv7": Family(RWKV7 | {"vocab_size": VOCAB, "max_position_embeddings": 256}, rwkv7),
        "solar": _family(
            "SolarForCausalLM",
            solar,
            num_hidden_layers=5,
            bskcn_1=[1],
            bskcn_2=[2],
            bskcn_3=[3, 4],
            bskcn_4=[4],
            bskcn_tv=[0.9, 0.8],
        ),
        "teleflm": _family(
            "TeleFLMForCausalLM",
            llama(_PLAIN, Switches(embed_scale=2.0, logit_scale=0.25)),
            use_mup=True,
            input_mult=2.0,
            output_mult=1.0,
            mup_scale_factor=4.0,
        ),
        "xlstm": Family(XLSTM | {"vocab_size": VOCAB}, xlstm),
        "xverse": _renamed("XverseForCausalLM", _PLAIN),
        "yi": _renamed("YiForCausalLM", Names(first_norm="ln1", second_norm="ln2")),
        **{name: Family(raw, run) for name, (raw, run) in (MORE | LATER).items()},
    }
)
