"""Quantises the linear layers of a model with calibration texts: GPTQ, one layer at a time.

The inputs of each layer come from the quantised layers before it. Experts are quantised without
calibration, because few rows visit each of them. Finished layers are written to one file each, so
an interrupted run resumes after the last one.

Shapes: T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import nn

from sylvan.kernels.matmul.gptq import Moments, gptq_int4
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.dense import DenseAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.groups import kv_groups
from sylvan.runtime.models.quantise import format_of, group_of, matrices
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.models.slots import Slot, slots, source_rows
from sylvan.runtime.pool.mha import GroupShape, KVShape, MHAPool

_PAGE = 64
_FORMAT = format_of("w4a16")
_MIN_TOKENS = 2

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in total)."""


def calibrated(
    model_dir: Path,
    texts: Sequence[Sequence[int]],
    folder: Path,
    progress: Progress = lambda done, total: None,
    load_format: LoadFormat = "auto",
) -> Mapping[str, CodedWeight]:
    """Return the 4-bit matrices of linear layers, by the names of the checkpoint's tensors.

    Args:
        model_dir: The checkpoint; its model is loaded in float32.
        texts: Token ids of each text.
        folder: Stores finished layers, keyed by model and texts.
        progress: Called after each layer.
        load_format: Load format of the checkpoint.

    Raises:
        ConfigError: the model is not a native decoder, or there are no texts.
    """
    config, model, kept = prepared("w4a16-gptq", model_dir, texts, load_format)
    chosen = {name for name, _ in matrices(model, _FORMAT)}
    of_layer: dict[int, list[Slot]] = {}
    for slot in slots(model):
        if slot.name in chosen and isinstance(slot.module, Linear):
            of_layer.setdefault(int(slot.name.split(".")[1]), []).append(slot)
    found: dict[str, CodedWeight] = {}
    folder = run_folder(folder, model_dir, kept)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        run = _Run(config, model, kept)
        for index in range(len(model.layers)):
            file = folder / f"layer-{index}.safetensors"
            if file.is_file():
                made = _read(file)
                run.take(of_layer[index], made)
            else:
                made = run.round(index, of_layer[index])
                _write(file, made)
            found |= made
            run.advance(index)
            progress(index + 1, len(model.layers))
    return found


def prepared(
    quantization: str, model_dir: Path, texts: Sequence[Sequence[int]], load_format: LoadFormat
) -> tuple[ModelConfig, Decoder, Sequence[Sequence[int]]]:
    """Load a model in float32, and select the texts that are long enough.

    Raises:
        ConfigError: it is not a native decoder, or there are no texts.
    """
    config = load_config(model_dir)
    kept = [list(text) for text in texts if len(text) >= _MIN_TOKENS]
    if not kept:
        raise ConfigError(f"quantization {quantization} needs texts of at least two tokens")
    longest = max(map(len, kept))
    model = family_of(config).model(config, Build(dtype=torch.float32, length=longest))
    if not isinstance(model, Decoder) or config.latent or config.states or model.edited_layers:
        raise ConfigError(
            f"quantization {quantization}: {config.architecture} is not a decoder of ordinary "
            f"attention; {quantization.partition('-')[0]} rounds it without texts"
        )
    load_weights(model, model_dir, load_format=load_format)
    return config, model, kept


def run_folder(folder: Path, model_dir: Path, texts: Sequence[Sequence[int]]) -> Path:
    """Return the folder in which a run over these texts stores finished layers."""
    return folder / _identity(model_dir, texts)


def _identity(model_dir: Path, texts: Sequence[Sequence[int]]) -> str:
    """Return the digest of the texts and of the files of the model, which identifies a run."""
    hashed = xxhash.xxh3_128()
    for text in texts:
        hashed.update(np.array([len(text), *text], np.int64).tobytes())
    for file in sorted(model_dir.iterdir()):
        if file.is_file():
            found = file.stat()
            hashed.update(f"{file.name} {found.st_size} {found.st_mtime_ns}".encode())
    return hashed.hexdigest()


class CalibrationRun:
    """Texts that are processed layer by layer."""

    def __init__(self, config: ModelConfig, model: Any, texts: Sequence[Sequence[int]]) -> None:
        self._model, longest = model, max(map(len, texts))
        pages = -(-longest // _PAGE)
        groups = tuple(GroupShape(group.layers, pages + 1) for group in kv_groups(config))
        shape = KVShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_pages=pages + 1,
            page_size=_PAGE,
            groups=groups,
        )
        limits = BatchLimits(max_tokens=longest, max_reqs=1, max_pages_per_req=pages)
        self._batch = ForwardBatch(limits, MHAPool(shape, torch.float32), DenseAttention())
        for table in self._batch.host.page_tables:
            table[0] = np.arange(1, pages + 1)
        self._texts = texts
        self._rows: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for text in texts:
            self._rows.append((model.embed(self._ready(text)), None))

    def _ready(self, text: Sequence[int]) -> ForwardBatch:
        host, count = self._batch.host, len(text)
        position = np.arange(count)
        host.input_ids[:count], host.positions[:count] = text, position
        for slots_ in host.slot_mappings:
            slots_[:count] = _PAGE + position
        host.kv_lens[0], host.q_starts[:2], host.req_slots[0] = count, (0, count), 0
        host.sample_rows[0] = count - 1
        self._batch.ready(count, 1, 1)
        self._batch.attention.plan(self._batch)
        return self._batch

    def through(self, index: int) -> None:
        """Run all texts through a layer to collect input statistics; discard its outputs."""
        for number in range(len(self._texts)):
            self._layer(index, number)

    def advance(self, index: int) -> None:
        """Run all texts through a layer, and keep its outputs as the next layer's inputs."""
        self._rows = [self._layer(index, number) for number in range(len(self._texts))]

    def _layer(self, index: int, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, residual = self._rows[number]
        batch = self._ready(self._texts[number])
        kept = None if residual is None else residual.clone()
        return self._model.layers[index](rows.clone(), kept, batch)


class _Run(CalibrationRun):
    """A GPTQ run: quantises each layer before it computes the inputs of the next one."""

    def round(self, index: int, chosen: Sequence[Slot]) -> dict[str, CodedWeight]:
        """Quantise the layer's matrices with the inputs that they read."""
        seen: dict[str, Moments] = {}
        hooks = []
        for slot in chosen:
            weight = slot.parameter
            seen[slot.name] = Moments(weight.shape[1])
            hooks.append(slot.module.register_forward_pre_hook(_adder(seen[slot.name])))
        self.through(index)
        for hook in hooks:
            hook.remove()
        made: dict[str, CodedWeight] = {}
        for slot in chosen:
            group = group_of(slot.name, slot.shape[1], "int4")
            try:
                whole = gptq_int4(slot.parameter, seen[slot.name], group)
            except ValueError as error:
                raise ConfigError(f"quantization: {slot.name!r}: {error}") from None
            made |= _by_source(slot, whole)
            slot.parameter.copy_(whole.numbers())
        return made

    def take(self, chosen: Sequence[Slot], made: Mapping[str, CodedWeight]) -> None:
        """Put the matrices that an earlier run quantised into a layer."""
        for slot in chosen:
            for number, source in enumerate(slot.sources):
                slot.parameter[source_rows(slot, number)] = made[source].numbers()


def _adder(moments: Moments) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        moments.add(inputs[0])

    return add


def _by_source(slot: Slot, whole: CodedWeight) -> dict[str, CodedWeight]:
    return {source: whole[source_rows(slot, number)] for number, source in enumerate(slot.sources)}


def _write(file: Path, made: Mapping[str, CodedWeight]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in made.items():
        tensors |= {f"{name}:q": weight.q.contiguous(), f"{name}:scale": weight.scale.contiguous()}
    part = file.with_suffix(".part")
    save_file(tensors, part)
    part.rename(file)


def _read(file: Path) -> dict[str, CodedWeight]:
    tensors = load_file(file)
    found: dict[str, CodedWeight] = {}
    for key, q in tensors.items():
        name, _, part = key.rpartition(":")
        if part == "q":
            scale = tensors[f"{name}:scale"]
            found[name] = CodedWeight(q, scale, "int4", q.shape[1] * 2 // scale.shape[1])
    return found
