"""Scales the linear layers of a model by statistics of their inputs: AWQ and SmoothQuant.

Each input channel of a matrix is multiplied by a scale, and the operation before it (a norm, or the
up half of a gated feed-forward block) is divided by the same scale. The model computes the same
function, but quantisation changes it less. The scales of each finished layer are stored in a file,
so an interrupted run resumes after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sylvan.kernels.matmul.smoothing import InputStatistics, awq_scales, smoothquant_scales
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.calibrate import CalibrationRun, Progress, prepared, run_folder
from sylvan.runtime.layers.mlp import MLP, GatedMLP
from sylvan.runtime.models.decoder import PreNorm, Sandwich
from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.quantise import group_of
from sylvan.runtime.models.slots import slots, source_rows

Method = Literal["awq", "smoothquant"]


def smoothed(
    method: Method,
    model_dir: Path,
    texts: Sequence[Sequence[int]],
    folder: Path,
    progress: Progress = lambda done, total: None,
    load_format: LoadFormat = "auto",
) -> Mapping[str, torch.Tensor]:
    """Return the changed tensors, float32, by the names of the checkpoint's tensors.

    Args:
        method: The method that computes the scales.
        model_dir: The checkpoint; its model is loaded in float32.
        texts: Tokens of each text.
        folder: Stores the scales of finished layers, keyed by model and texts.
        progress: Called after each layer.
        load_format: Load format of the checkpoint.

    Raises:
        ConfigError: the model is not a native decoder with norms before its matrices, or there are
            no texts.
    """
    named = "w4a16-awq" if method == "awq" else "w8a8-smoothquant"
    config, model, kept = prepared(named, model_dir, texts, load_format)
    if not all(isinstance(block, PreNorm | Sandwich) for block in model.layers):
        raise ConfigError(
            f"quantization {named}: {config.architecture} has no norms of its own before each "
            f"matrix; {named.partition('-')[0]} rounds it without texts"
        )
    place = run_folder(folder, model_dir, kept) / method
    place.mkdir(parents=True, exist_ok=True)
    changed: set[int] = set()
    with torch.inference_mode():
        run = CalibrationRun(config, model, kept)
        for index, block in enumerate(model.layers):
            found, file = list(_pairs(block, method)), place / f"layer-{index}.safetensors"
            if file.is_file():
                scales = load_file(file)
            else:
                scales = _scales(run, index, found, method)
                part = file.with_suffix(".part")
                save_file(scales, part)
                part.rename(file)
            for pair in found:
                changed |= pair.fold(scales[pair.name])
            run.advance(index)
            progress(index + 1, len(model.layers))
    return {
        source: slot.parameter[source_rows(slot, number)].contiguous()
        for slot in slots(model)
        if id(slot.parameter) in changed
        for number, source in enumerate(slot.sources)
    }


@dataclass(frozen=True, slots=True)
class _Pair:
    """A matrix and the source of its inputs: a norm, or rows of another matrix."""

    name: str
    matrix: Any
    norm: Any = None
    above: Any = None

    def fold(self, scales: torch.Tensor) -> set[int]:
        """Multiply input channels by the scales, divide their source; return changed parameters."""
        touched = [self.matrix.weight]
        self.matrix.weight *= scales
        if self.norm is not None:
            offset = getattr(self.norm, "offset", 0.0)
            self.norm.weight.copy_((self.norm.weight + offset) / scales - offset)
            touched.append(self.norm.weight)
            if getattr(self.norm, "bias", None) is not None:
                self.norm.bias /= scales
                touched.append(self.norm.bias)
        if self.above is not None:
            count = len(scales)
            self.above.weight[-count:] /= scales[:, None]
            touched.append(self.above.weight)
            if self.above.bias is not None:
                self.above.bias[-count:] /= scales
                touched.append(self.above.bias)
        return {id(parameter) for parameter in touched}


def _pairs(block: Any, method: Method) -> Iterator[_Pair]:
    """Scalable matrices of a layer, in execution order."""
    yield _Pair("attention", block.self_attn.qkv_proj, norm=block.input_layernorm)
    sandwich = isinstance(block, Sandwich)
    norm = block.pre_feedforward_layernorm if sandwich else block.post_attention_layernorm
    mlp = block.mlp
    if isinstance(mlp, GatedMLP):
        yield _Pair("up", mlp.gate_up_proj, norm=norm)
        if method == "awq":
            yield _Pair("down", mlp.down_proj, above=mlp.gate_up_proj)
    elif isinstance(mlp, MLP):
        yield _Pair("up", mlp.up_proj, norm=norm)


def _scales(
    run: CalibrationRun, index: int, pairs: Sequence[_Pair], method: Method
) -> dict[str, torch.Tensor]:
    """Return the scales of a layer's pairs, from statistics of their inputs."""
    seen = {pair.name: InputStatistics(pair.matrix.weight.shape[1]) for pair in pairs}
    hooks = [pair.matrix.register_forward_pre_hook(_adder(seen[pair.name])) for pair in pairs]
    run.through(index)
    for hook in hooks:
        hook.remove()
    found: dict[str, torch.Tensor] = {}
    for pair in pairs:
        weight, stats = pair.matrix.weight, seen[pair.name]
        try:
            if method == "smoothquant":
                found[pair.name] = smoothquant_scales(weight, stats)
            else:
                group = group_of(f"layers.{index}.{pair.name}", weight.shape[1], "int4")
                found[pair.name] = awq_scales(weight, stats, group)
        except ValueError as error:
            raise ConfigError(f"quantization: layer {index}: {error}") from None
    return found


def _adder(seen: InputStatistics) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.add(inputs[0])

    return add
