"""Writes a checkpoint as one GGUF file, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sylvan.checkpoints.gguf.export import FREQUENCIES, GgufExport, Target, exported
from sylvan.checkpoints.gguf.quants import library
from sylvan.checkpoints.gguf.recipes import Recipe, fitting, recipe_of
from sylvan.checkpoints.gguf.tokenizer_export import Value, tokenizer_export
from sylvan.kernels.matmul.kquants import KINDS, rounded_blocks
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.checkpoint import Progress
from sylvan.runtime.models.config import read_config
from sylvan.runtime.models.files import LoadFormat, open_weights
from sylvan.runtime.models.formats import stored_format
from sylvan.runtime.models.stored import WeightFiles

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ARCHITECTURE, _VERSION = "general.architecture", 2


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Result: number of quantised matrices, sizes, and a warning about use in llama.cpp."""

    num_matrices: int
    bytes_before: int
    bytes_after: int
    problem: str


def write_gguf(
    model_dir: Path,
    out: Path,
    quantization: str,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
) -> WrittenFile:
    """Write `model_dir` to the new file `out`, quantised by the mix `gguf:NAME`.

    A failed write leaves no file behind.

    Raises:
        ConfigError: `out` exists or has another suffix, the model is quantised already, or has no
            GGUF counterpart; names the field or tensor.
    """
    recipe = recipe_of(quantization)
    if out.suffix != ".gguf":
        raise ConfigError(f"{str(out)!r} must end in .gguf, because {quantization} is one file")
    if out.exists():
        raise ConfigError(f"{str(out)!r} exists already; choose another path")
    config = read_config(model_dir)
    if stored_format(config) is not None:
        raise ConfigError(f"{str(model_dir)!r} is quantised already; use an original checkpoint")
    weights = open_weights(model_dir, load_format)
    export = exported(config, weights.tensors)
    text = tokenizer_export(model_dir, config)
    part = out.with_name(out.name + ".partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    job = _GgufTask(weights, export, recipe)
    try:
        _write(part, job, model_dir.name, dict(text.values), progress)
        part.rename(out)
    finally:
        part.unlink(missing_ok=True)
    rounded = sum(job.kind_of(target) not in _PLAIN for target in export.targets)
    return WrittenFile(rounded, weights.num_bytes, out.stat().st_size, text.problem)


def _write(
    path: Path, job: _GgufTask, name: str, values: dict[str, Value], progress: Progress | None
) -> None:
    gguf = library()
    writer = gguf.GGUFWriter(str(path), job.export.architecture)
    try:
        writer.add_name(name)
        writer.add_file_type(job.recipe.file_type)
        writer.add_quantization_version(_VERSION)
        for key, value in job.export.values.items():
            _add(writer, f"{job.export.architecture}.{key}", value)
        for key, value in values.items():
            _add(writer, key, value)
        total = done = 0
        for tensor, shape, dtype, size, kind in job.shapes():
            writer.add_tensor_info(tensor, shape, dtype, size, kind)
            total += size
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for content in job.contents():
            writer.write_tensor_data(content)
            done += content.nbytes
            if progress:
                progress(done, total)
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


@dataclass(frozen=True, slots=True)
class _GgufTask:
    weights: WeightFiles
    export: GgufExport
    recipe: Recipe

    def kind_of(self, target: Target) -> str:
        """The number type of a tensor; vectors and routers are not quantised."""
        shape = self.weights.tensors[target.sources[0]].shape
        if len(shape) < 2 or "ffn_gate_inp" in target.name:
            return "F32"
        of_file = self.recipe.of(
            target.name, target.layer, self.export.layers, tied=self.export.tied
        )
        return fitting(of_file, shape[-1])

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...], Any, int, Any]]:
        """Name, shape, dtype, bytes and number type of each tensor in the file."""
        gguf = library()
        for target in self.export.targets:
            shape = self.weights.tensors[target.sources[0]].shape
            kind = self.kind_of(target)
            if len(target.sources) > 1:
                shape = (len(target.sources), *shape)
            number = gguf.GGMLQuantizationType[kind]
            block, size = gguf.GGML_QUANT_SIZES[number]
            row = shape[-1] // block * size
            whole = row * int(np.prod(shape[:-1], dtype=np.int64))
            yield target.name, (*shape[:-1], row), np.dtype(np.uint8), whole, number
        if factors := self.export.frequencies:
            kind = gguf.GGMLQuantizationType.F32
            yield FREQUENCIES, (len(factors),), np.dtype(np.float32), 4 * len(factors), kind

    def contents(self) -> Iterator[np.ndarray]:
        """The bytes of the tensors, in the same order."""
        for target in self.export.targets:
            kind = self.kind_of(target)
            parts = [self._encoded(name, target, kind) for name in target.sources]
            yield parts[0] if len(parts) == 1 else np.stack(parts)
        if factors := self.export.frequencies:
            yield np.array(factors, np.float32)

    def _encoded(self, name: str, target: Target, kind: str) -> np.ndarray:
        tensor = self.weights.tensor(name)
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise ConfigError(f"tensor {name!r} is stored as {tensor.dtype}, not as plain numbers")
        if not tensor.isfinite().all():
            raise ConfigError(f"the weights of {name!r} are not finite (NaN or infinity)")
        if target.interleaved_heads:
            tensor = _in_pairs(name, tensor, target.interleaved_heads)
        if kind in _PLAIN:
            made = tensor.to(_PLAIN[kind]).contiguous()
            if not made.isfinite().all():
                raise ConfigError(f"the weights of {name!r} do not fit into {kind}")
            return made.view(torch.uint8).numpy()
        if kind in KINDS:
            return rounded_blocks(tensor, kind).numpy()
        gguf = library()
        rows = np.ascontiguousarray(tensor.float().numpy())
        return gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])


def _in_pairs(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleave the two halves of each head's rows, for llama.cpp's rotary kernel."""
    if tensor.shape[0] % (2 * heads):
        raise ConfigError(f"{name!r} is {list(tensor.shape)}, which {heads} heads do not divide")
    halves = tensor.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(tensor.shape)
