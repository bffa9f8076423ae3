"""Writes the built-in model in the shape of a model of half a billion parameters, with the same
answers.

All additions are zeros: columns, heads, inner columns and tokens without effect, and layers that
add nothing. So a drafter for the built-in model can be measured on a model that costs a hundred
times as much.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from sylvan.runtime.features.speculation.contexts import FILE, TreeArrays

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
SIZES = (
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "num_hidden_layers",
    "vocab_size",
)
NORMS = ("input_layernorm", "post_attention_layernorm", "hidden_norm")


class Widening:
    """Extends tensors of a small model to a larger shape; head size and key heads stay the same.

    Args:
        config: Configuration of the small model.
        shape: Sizes of the large model, by their names in config.json.
    """

    def __init__(self, config: Mapping[str, Any], shape: Mapping[str, Any]) -> None:
        self.old, self.dim = config["hidden_size"], shape["hidden_size"]
        self.heads, self.size = shape["num_attention_heads"], config["head_dim"]
        self.keys, self.inner = config["num_key_value_heads"], shape["intermediate_size"]
        assert self.keys == shape["num_key_value_heads"]
        group, wide = config["num_attention_heads"] // self.keys, self.heads // self.keys
        spots = [kv * wide + i for kv in range(self.keys) for i in range(group)]
        self._rows = torch.cat([torch.arange(i * self.size, (i + 1) * self.size) for i in spots])

    def matrix(self, given: torch.Tensor, rows: int) -> torch.Tensor:
        """Widen the columns of a matrix, which hold vectors of the model; add rows."""
        out = torch.zeros(rows, given.shape[1] // self.old, self.dim, dtype=torch.bfloat16)
        out[: len(given), :, : self.old] = given.unflatten(1, (-1, self.old))
        return out.flatten(1)

    def norm(self, given: torch.Tensor) -> torch.Tensor:
        """Scale a norm for the added columns, which are zero and would change the mean."""
        out = torch.zeros(self.dim, dtype=torch.bfloat16)
        out[: self.old] = (given.float() * math.sqrt(self.old / self.dim)).bfloat16()
        return out

    def layer(self, stem: str, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all tensors of a layer, by name."""
        found = {
            f"{name}.weight": self.norm(given[f"{stem}{name}.weight"])
            for name in NORMS
            if f"{stem}{name}.weight" in given
        }
        for name in ("q_proj", "k_proj", "v_proj"):
            matrix = given[f"{stem}self_attn.{name}.weight"]
            found[f"self_attn.{name}.weight"] = self.matrix(matrix, len(matrix))
        queries = found["self_attn.q_proj.weight"]
        found["self_attn.q_proj.weight"] = self._scattered(queries)
        out = torch.zeros(self.dim, self.heads * self.size, dtype=torch.bfloat16)
        out[: self.old, self._rows] = given[f"{stem}self_attn.o_proj.weight"].bfloat16()
        found["self_attn.o_proj.weight"] = out
        for name in ("gate_proj", "up_proj"):
            found[f"mlp.{name}.weight"] = self.matrix(given[f"{stem}mlp.{name}.weight"], self.inner)
        down = given[f"{stem}mlp.down_proj.weight"]
        wide = torch.zeros(self.dim, self.inner, dtype=torch.bfloat16)
        wide[: self.old, : down.shape[1]] = down
        found["mlp.down_proj.weight"] = wide
        return found

    def _scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """Place rows of query heads next to the heads of their keys."""
        out = torch.zeros(self.heads * self.size, rows.shape[1], dtype=torch.bfloat16)
        out[self._rows] = rows
        return out


def write_wide(small: Path, shape: Mapping[str, Any], folder: Path) -> Path:
    """Write the model in `small` (a Llama with tied embeddings) in a larger shape."""
    config = json.loads((small / "config.json").read_text())
    weights, wide = load_file(small / "model.safetensors"), Widening(config, shape)
    made = {
        "model.embed_tokens.weight": wide.matrix(
            weights["model.embed_tokens.weight"], shape["vocab_size"]
        ),
        "model.norm.weight": wide.norm(weights["model.norm.weight"]),
    }
    for number in range(shape["num_hidden_layers"]):
        real = number < config["num_hidden_layers"]
        layer = wide.layer(f"model.layers.{number if real else 0}.", weights)
        if not real:  # it adds nothing
            layer["self_attn.o_proj.weight"].zero_()
            layer["mlp.down_proj.weight"].zero_()
        made |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    _write(folder, config, shape, made)
    for name in COPIED:
        shutil.copy(small / name, folder / name)
    with np.load(small / FILE) as stored:
        parts = (stored[name] for name in ("parents", "tokens", "predictions", "shares"))
        parents, tokens, predictions, shares = parts
        TreeArrays(parents, tokens, predictions, shares, shape["vocab_size"]).save(folder)
    return folder


def write_wide_head(small: Path, shape: Mapping[str, Any], folder: Path) -> Path:
    """Write the EAGLE-3 head in `small` for the model in a larger shape."""
    config = json.loads((small / "config.json").read_text())
    weights, wide = load_file(small / "model.safetensors"), Widening(config, shape)
    drafted = torch.zeros(shape["vocab_size"], dtype=torch.bool)
    drafted[: len(weights["t2d"])] = weights["t2d"]
    layer = wide.layer("midlayer.", weights)
    made = {
        "fc.weight": wide.matrix(weights["fc.weight"], wide.dim),
        "norm.weight": wide.norm(weights["norm.weight"]),
        "lm_head.weight": wide.matrix(weights["lm_head.weight"], len(weights["lm_head.weight"])),
        "d2t": weights["d2t"],
        "t2d": drafted,
    } | {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    _write(folder, config, {**shape, "num_hidden_layers": 1}, made)
    return folder


def _write(
    folder: Path, config: dict[str, Any], shape: Mapping[str, Any], made: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    small_eps = config["rms_norm_eps"] * config["hidden_size"] / shape["hidden_size"]
    sizes = {name: shape[name] for name in SIZES} | {"target_hidden_size": shape["hidden_size"]}
    whole = config | sizes | {"rms_norm_eps": small_eps}
    (folder / "config.json").write_text(json.dumps(whole, indent=2))
