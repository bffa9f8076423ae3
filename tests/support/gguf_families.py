"""Writes checkpoints of transformers as llama.cpp's converter does, family by family.

What the converter does to a family is written out here once more: rows of heads in pairs, ones
added to norms, experts as stacks, and the keys of metadata. Names are those of gguf's own table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from tests.support.gguf_files import add_words, encoded, paired, write

PAIRED = ("llama", "granite", "minicpm", "smollm3", "arcee")
RAISED = ("gemma", "gemma2", "gemma3", "nemotron")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight\Z")
_STACKS = {
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}

Keys = Callable[[gguf.GGUFWriter, Any], None]


def common(out: gguf.GGUFWriter, config: Any) -> None:
    """Keys of every family."""
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters or {}
    rope = rope.get("full_attention", rope)
    out.add_rope_freq_base(rope["rope_theta"])
    for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"):
        eps = getattr(config, name, None)
        if eps is not None:
            by_rms = name == "rms_norm_eps"
            (out.add_layer_norm_rms_eps if by_rms else out.add_layer_norm_eps)(eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    out.add_key_length(head)
    out.add_value_length(head)
    out.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))


def experts(out: gguf.GGUFWriter, config: Any) -> None:
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    out.add_expert_count(count or config.n_routed_experts)
    out.add_expert_used_count(config.num_experts_per_tok)
    if inner := getattr(config, "moe_intermediate_size", None):
        out.add_expert_feed_forward_length(inner)
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        out.add_expert_shared_feed_forward_length(shared)


def grouped(out: gguf.GGUFWriter, config: Any) -> None:
    experts(out, config)
    out.add_expert_shared_count(config.n_shared_experts)
    out.add_leading_dense_block_count(config.first_k_dense_replace)
    out.add_expert_weights_norm(config.norm_topk_prob)
    out.add_expert_weights_scale(config.routed_scaling_factor)
    out.add_expert_group_count(config.n_group)
    out.add_expert_group_used_count(config.topk_group)


def granite(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_attention_scale(config.attention_multiplier)
    out.add_embedding_scale(config.embedding_multiplier)
    out.add_residual_scale(config.residual_multiplier)
    out.add_logit_scale(config.logits_scaling)


def capped(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_attn_logit_softcapping(config.attn_logit_softcapping)
    out.add_final_logit_softcapping(config.final_logit_softcapping)
    windowed(out, config)


def windowed(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_sliding_window(config.sliding_window)


def long(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


def cohere(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_logit_scale(config.logit_scale)
    if getattr(config, "sliding_window", None):
        windowed(out, config)


def parallel(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_parallel_residual(config.use_parallel_residual)


def write_family(
    folder: Path,
    path: Path,
    family: str,
    config: Any,
    keys: tuple[Keys, ...],
    kinds: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Write the checkpoint in `folder`; the values that the file holds, by the checkpoint's names.

    `kinds`: how matrices are stored, by part of their name in the file; others as F32.
    """
    state = load_file(folder / "model.safetensors")
    out = gguf.GGUFWriter(str(path), family)
    common(out, config)
    add_words(out, config.vocab_size)
    for more in keys:
        more(out, config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    held: dict[str, np.ndarray] = {}
    for name, stored in state.items():
        values = stored
        if match := _EXPERT.match(name):
            layer = re.search(r"layers\.(\d+)", name)
            stack = f"blk.{layer[1]}.{_STACKS[match[3]]}.weight"
            stacks.setdefault(stack, {})[int(match[2])] = values
            continue
        stem, _, end = name.rpartition(".")
        if end == "e_score_correction_bias":
            stem, end = name.removesuffix("_bias"), "bias"
        theirs = names.get_name(stem) or names.get_name(name)
        assert theirs is not None, name
        part = theirs.rpartition(".")[2]
        if family in PAIRED and part in heads:
            values = paired(stored, heads[part])
        if family in RAISED and end == "weight" and "norm" in part:
            values = stored + 1
        _add(out, f"{theirs}.{end}", values.squeeze(), kinds)
    for stack, parts in stacks.items():
        held[stack] = _add(out, stack, np.stack([parts[i] for i in range(len(parts))]), kinds)
    write(out)
    return held


def _add(
    out: gguf.GGUFWriter, name: str, values: np.ndarray, kinds: Mapping[str, str] | None
) -> np.ndarray:
    """Add a tensor; what it holds."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    kind = Kind[(kinds or {}).get(part, "F32")]
    raw = encoded(np.ascontiguousarray(values, np.float32), kind)
    out.add_tensor(name, raw, raw_dtype=kind)
    return gguf.quants.dequantize(raw, kind).reshape(values.shape)
