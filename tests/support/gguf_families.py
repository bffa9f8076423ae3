"""Writes checkpoints of transformers as llama.cpp's converter does, family by family.

The converter's steps for each family are reimplemented here: interleaved rows of heads, ones
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
from safetensors.torch import load_file

from tests.support.gguf_converters import CONVERTERS
from tests.support.gguf_files import add_words, encoded, paired, write

PAIRED = (
    *("llama", "granite", "minicpm", "smollm3", "arcee", "mistral3", "internlm2", "granitemoe"),
    *("granitehybrid",),
)
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
    out.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
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


def delta(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    out.add_ssm_state_size(config.linear_key_head_dim)
    out.add_ssm_group_count(config.linear_num_key_heads)
    out.add_ssm_time_step_rank(config.linear_num_value_heads)
    out.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)


def latent(out: gguf.GGUFWriter, config: Any) -> None:
    if config.q_lora_rank:
        out.add_q_lora_rank(config.q_lora_rank)
    rope_dim = config.qk_rope_head_dim
    out.add_head_count_kv(1)
    out.add_kv_lora_rank(config.kv_lora_rank)
    out.add_key_length(config.kv_lora_rank + rope_dim)
    out.add_value_length(config.kv_lora_rank)
    out.add_key_length_mla(config.qk_nope_head_dim + rope_dim)
    out.add_value_length_mla(config.v_head_dim)
    out.add_rope_dimension_count(rope_dim)


def sigmoid(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def yarn(out: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    out.add_rope_scaling_factor(rope["factor"])
    out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name in ("beta_fast", "beta_slow"):
        if rope.get(name):
            getattr(out, f"add_rope_scaling_yarn_{name}")(rope[name])


def legacy_scores(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def temperature(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    out.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def inner_experts(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_expert_feed_forward_length(config.intermediate_size)


def llama4(out: gguf.GGUFWriter, config: Any) -> None:
    inner_experts(out, config)
    out.add_feed_forward_length(config.intermediate_size_mlp)
    out.add_interleave_moe_layer_step(config.interleave_moe_layer_step)


def hunyuan(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_expert_count(config.num_experts)
    out.add_expert_used_count(config.moe_topk)
    out.add_expert_shared_feed_forward_length(config.intermediate_size)
    inner_experts(out, config)


def ernie(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_expert_count(config.moe_num_experts)
    out.add_expert_used_count(config.moe_k)
    out.add_interleave_moe_layer_step(config.moe_layer_interval)
    out.add_leading_dense_block_count(config.moe_layer_start_index)
    out.add_expert_feed_forward_length(config.moe_intermediate_size)
    out.add_expert_shared_count(config.moe_num_shared_experts)


def patterned(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_sliding_window(config.sliding_window)
    marks = [kind == "sliding_attention" for kind in config.layer_types]
    out.add_sliding_window_pattern(marks)


def some_attend(out: gguf.GGUFWriter, config: Any) -> None:
    """Heads of keys where a layer attends, 0 elsewhere."""
    attending = ("full_attention", "attention")
    heads = config.num_key_value_heads
    out.add_head_count_kv([heads if kind in attending else 0 for kind in config.layer_types])


def short(out: gguf.GGUFWriter, config: Any) -> None:
    some_attend(out, config)
    out.add_shortconv_l_cache(config.conv_L_cache)
    out.add_layer_norm_rms_eps(config.norm_eps)
    if getattr(config, "block_auto_adjust_ff_dim", False):
        inner = int(int(2 * config.intermediate_size / 3) * config.block_ffn_dim_multiplier)
        out.add_feed_forward_length(
            -(-inner // config.block_multiple_of) * config.block_multiple_of
        )
    if getattr(config, "num_experts", None):
        experts(out, config)
        out.add_leading_dense_block_count(config.num_dense_layers)
        sigmoid(out, config)


def granite_states(out: gguf.GGUFWriter, config: Any) -> None:
    some_attend(out, config)
    out.add_ssm_conv_kernel(config.mamba_d_conv)
    out.add_ssm_state_size(config.mamba_d_state)
    out.add_ssm_group_count(config.mamba_n_groups)
    out.add_ssm_time_step_rank(config.mamba_n_heads)
    out.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    out.add_rope_scaling_finetuned(False)


def granite_experts(out: gguf.GGUFWriter, config: Any) -> None:
    if config.num_local_experts:
        experts(out, config)
    out.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def pure_states(out: gguf.GGUFWriter, config: Any) -> None:
    """All keys of Mamba and Mamba 2; these have none of the common ones."""
    out.add_context_length(1 << 20)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(0)
    out.add_head_count(0)
    out.add_block_count(config.num_hidden_layers)
    out.add_ssm_conv_kernel(config.conv_kernel)
    out.add_ssm_state_size(config.state_size)
    out.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if config.model_type == "mamba2":
        out.add_ssm_inner_size(config.num_heads * config.head_dim)
        out.add_ssm_time_step_rank(config.num_heads)
        out.add_ssm_group_count(config.n_groups)
    else:
        out.add_ssm_inner_size(config.intermediate_size)
        out.add_ssm_time_step_rank(config.time_step_rank)
        out.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


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
    tensors = load_file(folder / "model.safetensors")
    state = {name: values.float().numpy() for name, values in tensors.items()}
    out = _begun(path, family, config, keys)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads: dict[str, int] = {}
    if family in PAIRED:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    converted = _converted(state, family, config)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    held: dict[str, np.ndarray] = {}
    for name, stored in converted:
        values = stored
        if name.startswith("blk."):
            held[name] = _add(out, name, values, kinds)
            continue
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
        if part in heads:
            values = paired(stored, heads[part])
        if family in RAISED and end == "weight" and "norm" in part:
            values = stored + 1
        _add(out, f"{theirs}.{end}", values.squeeze(), kinds)
    for stack, parts in stacks.items():
        held[stack] = _add(out, stack, np.stack([parts[i] for i in range(len(parts))]), kinds)
    write(out)
    return held


def _begun(path: Path, family: str, config: Any, keys: tuple[Keys, ...]) -> gguf.GGUFWriter:
    """A writer with all metadata."""
    out = gguf.GGUFWriter(str(path), family)
    if pure_states not in keys:
        common(out, config)
    add_words(out, config.vocab_size)
    for more in keys:
        more(out, config)
    return out


def _converted(
    state: Mapping[str, np.ndarray], family: str, config: Any
) -> list[tuple[str, np.ndarray]]:
    if family not in CONVERTERS:
        return [*state.items()]
    convert = CONVERTERS[family]
    return [pair for name, values in state.items() for pair in convert(name, values, config)]


def _add(
    out: gguf.GGUFWriter, name: str, values: np.ndarray, kinds: Mapping[str, str] | None
) -> np.ndarray:
    """Add a tensor; what it holds."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    kind = Kind[(kinds or {}).get(part, "F32")]
    raw = encoded(np.ascontiguousarray(values, np.float32), kind)
    out.add_tensor(name, raw, raw_dtype=kind)
    return gguf.quants.dequantize(raw, kind).reshape(values.shape)
