"""Maps llama.cpp's tensor names to the checkpoint's, and undoes its reordering."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from sylvan.checkpoints.gguf.family import GgufFamily
from sylvan.checkpoints.gguf.header import Header, StoredArray
from sylvan.checkpoints.gguf.keys import Keys
from sylvan.protocol.errors import ConfigError

Entry = dict[str, Any]
Heads = tuple[int, int]
"""Tensors of queries and keys."""

WHOLE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
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
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?\Z")
DERIVED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors whose contents become fields of the config."""
INTERLEAVED = frozenset({"attn_q", "attn_k"})
_WITHOUT_KIND = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias", ".D", "sinks")
_ONE_ROW = "shared_expert_gate"
_TAPS = frozenset({"ssm_conv1d", "shortconv.conv"})
_FLAT = frozenset({"ssm_d", "ssm_norm"})
_GATE_UP = "ffn_gate_up_exps"
_HALVES = (".k_b_proj.", ".v_b_proj.")


def layer_of(name: str) -> int:
    """The layer of a tensor; -1: none."""
    match = _NAME.match(name)
    return int(match[1]) if match and match[1] else -1


def entries_of(
    tensor: StoredArray, header: Header, family: GgufFamily, heads: Heads
) -> list[Entry]:
    """Return the checkpoint tensors that a tensor of the file corresponds to; a stack has several.

    An entry has name, type, shape and location; `interleaved_heads`: number of heads with
    interleaved rows; `add`: a number to add; `decay`: the stored value is -exp of the checkpoint's;
    `tiled`: see `_tiles`.

    Raises:
        ConfigError: The family has no such tensor, or a stack has another shape.
    """
    match = _NAME.match(tensor.name)
    layer, part, kind = match.groups("") if match else ("", "", "")
    path = f"{_stem(family)}layers.{layer}." if layer else ""
    if layer and part == _GATE_UP and family.experts:
        return _both(tensor, path, header, family)
    if layer and part in family.experts:
        end = ".weight" if kind == "weight" else "_bias.weight"
        return [
            _entry(tensor, f"{path}{family.experts[part].format(number)}{end}", shape, at)
            for number, (shape, at) in enumerate(_matrices(tensor, header))
        ]
    names = (LAYER_NAMES, family.names) if layer else (WHOLE_NAMES, family.whole)
    found = names[1].get(part) or names[0].get(part)
    if found is None:
        raise ConfigError(
            f"{str(header.file)!r} has the tensor {tensor.name!r}, which is not known"
        )
    name = path + found if found.endswith(_WITHOUT_KIND) else f"{path}{found}.{kind}"
    entry = _entry(tensor, name, _shape(tensor.shape, part, found))
    if family.pairs and part in INTERLEAVED:
        entry["interleaved_heads"] = heads[part != "attn_q"]
    if family.raised and kind == "weight" and "norm" in part and part != "ssm_norm":
        entry["add"] = -1.0
    if part == "ssm_a":
        entry["decay"] = True
    if family.tiled and (tiles := _tiles(Keys(header), part)):
        entry["tiled"] = tiles
    return [entry]


def _stem(family: GgufFamily) -> str:
    return family.whole.get("token_embd", "model.").partition(".")[0] + "."


def _shape(shape: tuple[int, ...], part: str, found: str) -> tuple[int, ...]:
    """Return a tensor's shape in the checkpoint: files drop or add dimensions of size one."""
    if part in _TAPS and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if part in _FLAT or (part == "ssm_a" and shape[-1:] == (1,)):
        return (math.prod(shape),)
    return (1, *shape) if found.endswith(_ONE_ROW) and len(shape) == 1 else shape


def _tiles(keys: Keys, part: str) -> Entry | None:
    """How value heads of a recurrent layer are ordered in a tensor; None: it has none.

    A checkpoint groups value heads by key head. A file has the first value head of every key head,
    then the second of every one, and so on. `before`: rows of other kinds; `size`: rows of a head;
    `dim`: dimension of the rows.
    """
    groups, heads = keys.number("ssm.group_count"), keys.number("ssm.time_step_rank")
    if groups == heads:
        return None
    size = keys.number("ssm.inner_size") // heads
    keys_too = 2 * groups * keys.number("ssm.state_size")
    found = {
        "attn_qkv": (0, keys_too, size),
        "ssm_conv1d": (0, keys_too, size),
        "attn_gate": (0, 0, size),
        "ssm_alpha": (0, 0, 1),
        "ssm_beta": (0, 0, 1),
        "ssm_a": (0, 0, 1),
        "ssm_dt": (0, 0, 1),
        "ssm_out": (1, 0, size),
    }
    if part not in found:
        return None
    dim, before, size = found[part]
    return {
        "dim": dim,
        "before": before,
        "groups": groups,
        "each": heads // groups,
        "size": size,
    }


def _both(tensor: StoredArray, path: str, header: Header, family: GgufFamily) -> list[Entry]:
    """Gate and up matrices of experts that are stored in one stack."""
    entries: list[Entry] = []
    for number, (shape, (start, stop)) in enumerate(_matrices(tensor, header)):
        half, middle = (shape[0] // 2, *shape[1:]), (start + stop) // 2
        for part, at in (("ffn_gate_exps", (start, middle)), ("ffn_up_exps", (middle, stop))):
            name = f"{path}{family.experts[part].format(number)}.weight"
            entries.append(_entry(tensor, name, half, at))
    return entries


def with_latent_heads(entries: list[Entry], heads: int) -> list[Entry]:
    """Join the two halves of each up-projection of latent attention.

    Files have the key half transposed per head; `halves` are the locations of both.

    Raises:
        ConfigError: One half is missing; names the other one.
    """
    found: list[Entry] = []
    halves: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        mark = next((mark for mark in _HALVES if mark in entry["name"]), None)
        if mark is None:
            found.append(entry)
        else:
            halves.setdefault(entry["name"].replace(mark, ".kv_b_proj."), {})[mark] = entry
    for name, pair in halves.items():
        if len(pair) != len(_HALVES):
            there = next(iter(pair.values()))["name"]
            raise ConfigError(f"the file has {there!r} without its other half")
        both = [pair[mark] for mark in _HALVES]
        rows = heads * (both[0]["shape"][-1] + both[1]["shape"][-2])
        found.append(
            {
                "name": name,
                "type": "halves",
                "shape": (rows, both[1]["shape"][-1]),
                "start": 0,
                "stop": sum(half["stop"] - half["start"] for half in both),
                "file": both[0]["file"],
                "halves": both,
            }
        )
    return found


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
    """Shape and location of each matrix of a stack."""
    if len(tensor.shape) < 2:
        raise ConfigError(
            f"{str(header.file)!r}: {tensor.name!r} is {list(tensor.shape)}, no stack of experts"
        )
    size = (tensor.stop - tensor.start) // tensor.shape[0]
    for start in range(tensor.start, tensor.stop, size):
        yield tensor.shape[1:], (start, start + size)
