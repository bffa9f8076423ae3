"""Reimplements llama.cpp's conversion of single families' tensors.

Each function gives the tensors that one of the checkpoint becomes, under names that gguf's table
knows, or under their final names, which begin with `blk.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Tensors = Iterable[tuple[str, np.ndarray]]
Converter = Callable[[str, np.ndarray, Any], Tensors]


def _block(name: str) -> str:
    """`blk.N.` of a tensor's layer."""
    match = re.search(r"layers\.(\d+)\.", name)
    assert match is not None, name
    return f"blk.{match[1]}."


def _gpt_oss(name: str, values: np.ndarray, config: Any) -> Tensors:
    stem, _, end = name.rpartition(".")
    if end == "sinks":
        return [(f"{name}.weight", values)]
    if ".experts" not in name:
        return [(name, values)]
    kind = "bias" if end.endswith("_bias") else "weight"
    values = values if kind == "bias" else values.swapaxes(1, 2)
    if end.startswith("gate_up"):
        gate, up = values[:, ::2], values[:, 1::2]
        return [(f"{stem}.gate_proj.{kind}", gate), (f"{stem}.up_proj.{kind}", up)]
    return [(f"{stem}.down_proj.{kind}", values)]


def _latent(name: str, values: np.ndarray, config: Any) -> Tensors:
    if not name.endswith("kv_b_proj.weight"):
        return [(name, values)]
    heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, found = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return [
        (name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)),
        (name.replace("kv_b_proj", "v_b_proj"), found),
    ]


def _llama4(name: str, values: np.ndarray, config: Any) -> Tensors:
    if ".experts." not in name:
        return [(name, values)]
    values = values.swapaxes(1, 2)
    if name.endswith("down_proj"):
        return [(f"{_block(name)}ffn_down_exps.weight", values)]
    gate, up = np.split(values, 2, axis=1)
    return [
        (f"{_block(name)}ffn_gate_exps.weight", gate),
        (f"{_block(name)}ffn_up_exps.weight", up),
    ]


def _granite(name: str, values: np.ndarray, config: Any) -> Tensors:
    block = _block(name) if "layers." in name else ""
    sides = "exps" if "block_sparse_moe." in name else "shexp" if config.num_local_experts else ""
    end = f"_{sides}.weight" if sides else ".weight"
    if name.endswith("input_linear.weight"):
        gate, up = np.split(values, 2, axis=-2)
        return [(f"{block}ffn_gate{end}", gate), (f"{block}ffn_up{end}", up)]
    if name.endswith("output_linear.weight"):
        return [(f"{block}ffn_down{end}", values)]
    return _second_states(name, values, config) if ".mamba." in name else [(name, values)]


def _first_states(name: str, values: np.ndarray, config: Any) -> Tensors:
    if name.endswith(".A_log"):
        return [(f"{_block(name)}ssm_a", -np.exp(values))]
    if name.endswith(".D"):
        return [(f"{_block(name)}ssm_d", values)]
    return [(name, values.squeeze() if "conv1d" in name else values)]


def _second_states(name: str, values: np.ndarray, config: Any) -> Tensors:
    if name.endswith((".A_log", ".D")):
        values = values.reshape(-1, 1)
    if name.endswith(".dt_bias"):
        return [(f"{_block(name)}ssm_dt.bias", values)]
    if re.search(r"\.(mamba|mixer)\.norm\.weight\Z", name):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        return [(f"{_block(name)}ssm_norm.weight", values.reshape(groups, -1))]
    return _first_states(name, values, config)


def _short(name: str, values: np.ndarray, config: Any) -> Tensors:
    if name.endswith(".expert_bias"):
        return [(f"{_block(name)}exp_probs_b.bias", values)]
    return [(name, values.squeeze(1) if "conv.conv" in name else values)]


def _delta(name: str, values: np.ndarray, config: Any) -> Tensors:
    """Qwen3-Next: inputs sorted, ones added to norms."""
    if name.endswith(".A_log"):
        return [(f"{_block(name)}ssm_a", -np.exp(values))]
    if name.endswith(".dt_bias"):
        return [(f"{_block(name)}ssm_dt.bias", values)]
    if "conv1d" in name:
        return [(name, values.squeeze())]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return [(name, values + 1)]
    if not name.endswith("in_proj_qkvz.weight"):
        return [(name, values)]
    groups, key, value = _delta_sizes(config)
    each = config.linear_num_value_heads // groups * value
    parts = values.reshape(groups, 2 * key + 2 * each, -1)
    q, k, v, z = np.split(parts, np.cumsum([key, key, each]), axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in (q, k, v, z))
    return [
        (f"{_block(name)}attn_qkv.weight", np.concatenate((q, k, v))),
        (f"{_block(name)}attn_gate.weight", z),
    ]


def _delta_sizes(config: Any) -> tuple[int, int, int]:
    return config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim


def _tiled(values: np.ndarray, config: Any, size: int) -> np.ndarray:
    """The first value head of each key head, then the next of each."""
    groups = config.linear_num_key_heads
    heads = values.reshape(groups, config.linear_num_value_heads // groups, size, -1)
    return heads.swapaxes(0, 1).reshape(values.shape)


def _tiled_delta(name: str, values: np.ndarray, config: Any) -> Tensors:
    """Qwen3.5: as Qwen3-Next with value heads in another order."""
    groups, key, value = _delta_sizes(config)
    if ".in_proj_qkv." in name or "conv1d" in name:
        before, rows = np.split(values, [2 * groups * key])
        values = np.concatenate((before, _tiled(rows, config, value)))
    elif ".in_proj_z." in name:
        values = _tiled(values, config, value)
    elif name.endswith((".A_log", ".dt_bias")) or re.search(r"\.in_proj_[ab]\.", name):
        values = _tiled(values, config, 1)
    elif name.endswith("linear_attn.out_proj.weight"):
        values = _tiled(values.T.copy(), config, value).T
    if ".experts." in name and values.ndim == 3:
        return _stacks(name, values)
    return _delta(name, values, config)


def _stacks(name: str, values: np.ndarray) -> Tensors:
    """Stacks as newer converters leave them: gate and up in one."""
    part = "ffn_gate_up_exps" if "gate_up" in name else "ffn_down_exps"
    return [(f"{_block(name)}{part}.weight", values)]


CONVERTERS: Mapping[str, Converter] = {
    "gpt-oss": _gpt_oss,
    "deepseek2": _latent,
    "llama4": _llama4,
    "granitemoe": _granite,
    "granitehybrid": _granite,
    "mamba": _first_states,
    "mamba2": _second_states,
    "lfm2": _short,
    "lfm2moe": _short,
    "qwen3next": _delta,
    "qwen35": _tiled_delta,
    "qwen35moe": _tiled_delta,
}
