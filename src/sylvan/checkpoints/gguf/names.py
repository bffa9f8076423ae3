"""What llama.cpp calls tensors -> what the checkpoint called them, and how they were reordered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sylvan.checkpoints.gguf.families import GgufFamily
from sylvan.checkpoints.gguf.header import Header, StoredArray
from sylvan.protocol.errors import ConfigError

Entry = dict[str, Any]
Heads = tuple[int, int]
"""Of queries, and of keys."""

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)\.(weight|bias)\Z")
DERIVED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that are part of the config."""
_TURNED = frozenset({"attn_q", "attn_k"})
_WITHOUT_KIND = "e_score_correction_bias"
_ONE_ROW = "shared_expert_gate"


def layer_of(name: str) -> int:
    """The number of a tensor's layer; -1: it is in none."""
    match = _NAME.match(name)
    return int(match[1]) if match and match[1] else -1


def entries_of(
    tensor: StoredArray, header: Header, family: GgufFamily, heads: Heads
) -> list[Entry]:
    """What a tensor is in the checkpoint that the file was made of: a stack is many.

    An entry has a name, type and shape, and where its bytes lie; `turned` heads whose rows are in
    pairs; `add`: a number to add to it.

    Raises:
        ConfigError: no tensor of this family is called so, or it has another shape than a stack.
    """
    match = _NAME.match(tensor.name)
    layer, part, kind = match.groups() if match else (None, "", "")
    path = "" if layer is None else f"model.layers.{layer}."
    if layer is not None and part in family.experts:
        return [
            _entry(tensor, f"{path}{family.experts[part].format(number)}.{kind}", shape, at)
            for number, (shape, at) in enumerate(_matrices(tensor, header))
        ]
    names = (_WHOLE, family.whole) if layer is None else (_LAYER, family.names)
    found = names[1].get(part) or names[0].get(part)
    if found is None:
        raise ConfigError(
            f"{str(header.file)!r} has the tensor {tensor.name!r}, which is not known"
        )
    name = path + found if found.endswith(_WITHOUT_KIND) else f"{path}{found}.{kind}"
    one_row = found.endswith(_ONE_ROW) and len(tensor.shape) == 1
    entry = _entry(tensor, name, (1, *tensor.shape) if one_row else tensor.shape)
    if family.pairs and part in _TURNED:
        entry["turned"] = heads[part != "attn_q"]
    if family.raised and kind == "weight" and "norm" in part:
        entry["add"] = -1.0
    return [entry]


def _entry(
    tensor: StoredArray, name: str, shape: tuple[int, ...], at: tuple[int, int] | None = None
) -> Entry:
    start, stop = at or (tensor.start, tensor.stop)
    return {
        "name": name,
        "type": tensor.quant.name,
        "shape": shape,
        "start": start,
        "stop": stop,
        "file": tensor.file,
    }


def _matrices(
    tensor: StoredArray, header: Header
) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Shape and place of each matrix of a stack."""
    if len(tensor.shape) < 2:
        raise ConfigError(
            f"{str(header.file)!r}: {tensor.name!r} is {list(tensor.shape)}, no stack of experts"
        )
    size = (tensor.stop - tensor.start) // tensor.shape[0]
    for start in range(tensor.start, tensor.stop, size):
        yield tensor.shape[1:], (start, start + size)
