"""Writes quantised checkpoints in published formats, for all peers that read them: GGUF, GPTQ, AWQ.

Sylvan's environment writes them, so that peers are compared on the same file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GROUP = 128
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which output each nibble of a word is

FILES: Mapping[str, str] = {
    "gguf:Q4_K_M": "Q4_K_M.gguf",
    "gguf:Q4_0": "Q4_0.gguf",
    "gptq": "gptq",
    "awq": "awq",
    "gptq, head in 8 bits": "gptq-head8",
}
"""Formats that several peers read, and the end of the name of the file or folder."""


def write_stored(model: Path, form: str, out: Path) -> None:
    """Write the checkpoint `model` in one of `FILES` to the new path `out`."""
    if form.startswith("gguf:"):
        from sylvan.runtime.models.gguf_writer import write_gguf

        write_gguf(model, out, form)
        return
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = _AWQ if form == "awq" else _GPTQ
    if form.endswith("head in 8 bits"):
        config["sylvan"] = {"head_bits": 8}
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(model / "model.safetensors", "pt") as stored:
        for name in stored.keys():  # noqa: SIM118 - the handle is no mapping
            value = stored.get_tensor(name)
            if name.endswith("_proj.weight"):
                packed = _awq(value) if form == "awq" else _gptq(value)
                tensors |= {name.removesuffix("weight") + end: part for end, part in packed}
            else:
                tensors[name] = value
    out.mkdir(parents=True)
    for file in model.glob("*token*.json"):
        shutil.copyfile(file, out / file.name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2))


_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
}


def _gptq(weight_NK: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantise symmetrically, rounding to nearest; a word holds 8 inputs of an output."""
    import torch

    groups = weight_NK.float().unflatten(1, (-1, GROUP))
    scale_NG = (groups.abs().amax(-1) / 7).clamp(min=1e-8).half()
    levels = (groups / scale_NG.float()[..., None]).round().clamp(-8, 7).int() + 8
    zeros_GN = torch.full_like(scale_NG.T, 7, dtype=torch.int32)  # stored less one
    yield "qweight", _words(levels.flatten(1).T.contiguous(), 0)
    yield "qzeros", _words(zeros_GN, 1)
    yield "scales", scale_NG.T.contiguous()
    yield "g_idx", torch.arange(weight_NK.shape[1], dtype=torch.int32) // GROUP


def _awq(weight_NK: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantise with zero points, rounding to nearest; a word holds 8 outputs of an input, in AWQ's
    order.
    """
    groups = weight_NK.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale_NG = ((high - low) / 15).clamp(min=1e-8).half()
    zeros_NG = (-low / scale_NG.float()).round().clamp(0, 15).int()
    levels = (groups / scale_NG.float()[..., None]).round().int() + zeros_NG[..., None]
    levels_KN = levels.clamp(0, 15).flatten(1).T

    def packed(levels: torch.Tensor) -> torch.Tensor:
        return _words(levels.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 1)

    yield "qweight", packed(levels_KN)
    yield "qzeros", packed(zeros_NG.T)
    yield "scales", scale_NG.T.contiguous()


def _words(levels: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack eight neighbours along `dim` into an int32 word, the first in its lowest bits."""
    import torch

    parts = levels.unflatten(dim, (-1, 8)).unbind(dim + 1)
    word = torch.zeros_like(parts[0], dtype=torch.int64)
    for place, part in enumerate(parts):
        word |= part.long() << 4 * place
    return word.to(torch.int32).contiguous()  # the highest bit is the sign
