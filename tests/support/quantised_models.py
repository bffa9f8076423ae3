"""Tiny Llamas in the formats of quantised checkpoints; needs no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.quantised import CASES, TOOLS
from tests.support.random_model import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, write_random_model

HIDDEN, INNER, HEADS, CONTEXT = 256, 512, 16, 256
_GGUF = "gguf "


def write_plain_model(folder: Path) -> Path:
    """Write a model whose sizes the blocks and groups of all formats divide."""
    return write_random_model(folder, CONTEXT, hidden=HIDDEN, inner=INNER, heads=HEADS)


def write_quantised_model(folder: Path, case: str) -> Path:
    """Write the model in a format of `CASES` or `TOOLS`, or as "gguf KIND"; return its directory or
    file.
    """
    write_plain_model(folder)
    if case.startswith(_GGUF):
        return _write_gguf(folder, case.removeprefix(_GGUF))
    make, arguments, settings = {**CASES, **TOOLS}[case]
    tensors: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        if tensor.dim() != 2 or "layers." not in name:
            tensors[name] = tensor
            continue
        stored = make(tuple(tensor.shape), seed, **arguments)
        stem = name.removesuffix("weight")
        tensors |= {stem + end: part for end, part in stored.parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    return folder


def _write_gguf(folder: Path, kind: str) -> Path:
    import gguf

    from tests.support import gguf_files

    config = SimpleNamespace(
        max_position_embeddings=CONTEXT,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0},
        head_dim=HEAD_DIM,
    )
    path = folder / f"{kind}.gguf"
    out = gguf_files.writer(path, "llama", config)
    gguf_files.add_words(out, VOCAB)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in load_file(folder / "model.safetensors").items():
        theirs = names.get_name(name.removesuffix(".weight"))
        used = gguf.GGMLQuantizationType[kind if "proj" in name else "F32"]
        values = np.ascontiguousarray(tensor.float().numpy())
        raw = gguf_files.encoded(values, used)  # rows of heads are random in any order
        out.add_tensor(f"{theirs}.weight", raw, raw_dtype=used)
    gguf_files.write(out)
    return path
