"""Writes a quantised copy of a checkpoint, one tensor in memory at a time.

The copy is an ordinary Hugging Face directory in the layout of compressed-tensors. Its head stays
in plain numbers, as other tools expect; Sylvan rounds it while loading, as config.json notes.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn

from sylvan.checkpoints.formats import GGUF_INDEX
from sylvan.kernels.matmul.rounding import FP8_BLOCK
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import Progress, WeightReader
from sylvan.runtime.models.config import read_config
from sylvan.runtime.models.files import LoadFormat, open_weights
from sylvan.runtime.models.formats import stored_format
from sylvan.runtime.models.formats.compressed_tensors import (
    quantization_config,
    stored_as,
    stored_by_scheme,
)
from sylvan.runtime.models.quantise import (
    Format,
    check_model,
    convert,
    format_of,
    group_of,
    matrices,
)
from sylvan.runtime.models.registry import choose_path, family_of
from sylvan.runtime.models.safetensors import DTYPE_NAMES
from sylvan.runtime.models.slots import slots
from sylvan.runtime.models.stored import WeightFiles

WEIGHTS = "model.safetensors"
_SKIPPED = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pth"),
    GGUF_INDEX,
)


@dataclass(frozen=True, slots=True)
class Written:
    """Result of writing a checkpoint."""

    num_matrices: int
    bytes_before: int
    bytes_after: int


def write_quantised(
    model_dir: Path,
    out_dir: Path,
    quantization: str,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
    given: Mapping[str, CodedWeight | torch.Tensor] | None = None,
) -> Written:
    """Write `model_dir` to the new directory `out_dir`, its matrices rounded.

    A failed write leaves nothing behind. `load_format` is the setting of that name. `given` has, by
    the model's names, matrices that are already quantised, and replacements of checkpoint tensors
    that are still to be quantised.

    Raises:
        ConfigError: `out_dir` exists, or the model cannot be read or quantised like this.
    """
    wanted = format_of(quantization)
    check_new(model_dir, out_dir)
    config = choose_path(read_config(model_dir)).config
    check_model(config)
    dtype = getattr(torch, config.dtype)
    build = Build(dtype=dtype, length=1, device=torch.device("meta"))
    model = family_of(config).model(config, build)
    checkpoint = open_weights(model_dir, load_format)
    reader = WeightReader(model, checkpoint)
    bits = _bits_by_tensor(model, reader, wanted)
    rounded = {
        reader.stored_name(name): weight
        for name, weight in (given or {}).items()
        if isinstance(weight, CodedWeight)
    }
    others = _by_stored_name(reader, given or {})
    job = _WriteTask(checkpoint, bits, dtype, wanted, rounded, others)
    with _new_folder(out_dir) as part:
        _copy_others(model_dir, part)
        settings = _config(model_dir, job, wanted)
        (part / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        size = job.write(part / WEIGHTS, progress)
    return Written(len(job.bits), checkpoint.num_bytes, size)


def _by_stored_name(
    reader: WeightReader, given: Mapping[str, CodedWeight | torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The plain tensors.

    Raises:
        ConfigError: the checkpoint has one in another order; names it.
    """
    found: dict[str, torch.Tensor] = {}
    for source, tensor in given.items():
        if isinstance(tensor, CodedWeight):
            continue
        name = reader.stored_name(source)
        if reader.reorders(source, name):
            raise ConfigError(f"{name!r} is stored in another order than in the model")
        found[name] = tensor
    return found


def check_new(model_dir: Path, out_dir: Path) -> None:
    """Check that a quantised copy can be written.

    Raises:
        ConfigError: `out_dir` exists, or the model is quantised already.
    """
    if out_dir.exists():
        raise ConfigError(f"{str(out_dir)!r} exists already; choose another path")
    if stored_format(read_config(model_dir)) is not None:
        raise ConfigError(f"{str(model_dir)!r} is quantised already")


def write_checkpoint(
    model_dir: Path, out_dir: Path, weights: WeightFiles, progress: Progress | None = None
) -> None:
    """Write `model_dir` to the new directory `out_dir` with other weights.

    Nothing is left behind when it fails.

    Raises:
        ConfigError: `out_dir` exists, or the weights are not finite.
    """
    if out_dir.exists():
        raise ConfigError(f"{str(out_dir)!r} exists already; choose another path")
    with _new_folder(out_dir) as part:
        _copy_others(model_dir, part)
        shutil.copyfile(model_dir / "config.json", part / "config.json")
        _WriteTask(weights, {}, torch.float32).write(part / WEIGHTS, progress)


@contextmanager
def _new_folder(out_dir: Path) -> Iterator[Path]:
    """A temporary directory that is renamed to `out_dir` when complete."""
    part = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(out_dir)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _bits_by_tensor(model: nn.Module, reader: WeightReader, wanted: Format) -> dict[str, int]:
    """Bits of each tensor to quantise."""
    bits = dict(matrices(model, replace(wanted, head_bits=None)))
    found: dict[str, int] = {}
    for slot in slots(model):
        for source in slot.sources if slot.name in bits else ():
            name = reader.stored_name(source)
            if reader.reorders(source, name):
                raise ConfigError(
                    f"{name!r} is stored in another order than linear layers; quantise this model "
                    f"while loading instead (--quantization {wanted.name})"
                )
            found[name] = bits[slot.name]
    return found


def _config(model_dir: Path, job: _WriteTask, wanted: Format) -> dict[str, object]:
    settings = json.loads((model_dir / "config.json").read_text("utf-8"))
    plain = sorted(name for name in job.checkpoint.tensors if name not in job.bits)
    ignore = [n.removesuffix(".weight") for n in plain if n.startswith("lm_head.")] or ["lm_head"]
    tensors = job.checkpoint.tensors
    fours = [name for name, bits in job.bits.items() if bits == 4 and wanted.scheme is None]
    groups = {group_of(name, tensors[name].shape[1], wanted.code) for name in fours}
    if len(groups) > 1:
        sizes = " and of ".join(map(str, sorted(groups)))
        raise ConfigError(
            f"quantization: the matrices need groups of {sizes} inputs, which one checkpoint "
            "cannot have; quantise while loading, or choose w8a8"
        )
    found = quantization_config(wanted, next(iter(groups), None), ignore)
    return settings | {
        "quantization_config": found,
        "sylvan": {"head_bits": wanted.head_bits},
    }


def _copy_others(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_SKIPPED):
            shutil.copyfile(file, target / file.name)


@dataclass(frozen=True, slots=True)
class _WriteTask:
    checkpoint: WeightFiles
    bits: dict[str, int]
    dtype: torch.dtype
    wanted: Format | None = None
    made: Mapping[str, CodedWeight] = field(default_factory=dict[str, CodedWeight])
    changed: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def write(self, path: Path, progress: Progress | None) -> int:
        """Write all tensors; returns the bytes of the file."""
        total, done = self.checkpoint.num_bytes, 0
        with path.open("xb") as stream:
            stream.write(self._header())
            for name in self.checkpoint.tensors:
                for tensor in self._contents(name).values():
                    _write(stream, tensor)
                stored = self.checkpoint.tensors[name]
                done += stored.stop - stored.start
                if progress:
                    progress(done, total)
            return stream.tell()

    def _contents(self, name: str) -> dict[str, torch.Tensor]:
        tensor = self.checkpoint.tensor(name)
        if name in self.changed:
            tensor = self.changed[name].to(tensor.dtype).view(tensor.shape)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ConfigError(f"the weights of {name!r} are not finite (NaN or infinity)")
        if name not in self.bits:
            return {name: tensor}
        if name in self.made:
            return stored_as(name, self.made[name])
        return self._rounded(name, tensor.to(self.dtype))

    def _rounded(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        scheme = self.wanted.scheme if self.wanted else None
        rounded = convert(name, tensor, self.bits[name], self.wanted)
        if scheme is None:
            return stored_as(name, rounded)
        return stored_by_scheme(name, rounded, tensor, scheme)

    def _shapes(self, name: str) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        stored = self.checkpoint.tensors[name]
        if name not in self.bits:
            yield name, stored.dtype, stored.shape
            return
        # one row of zeros yields the types and columns of all rows
        rows, cols = stored.shape
        by_block = self.wanted is not None and self.wanted.scheme == "fp8-block"
        for key, tensor in self._rounded(name, torch.zeros(1, cols)).items():
            count = -(-rows // FP8_BLOCK) if by_block and key != name else rows
            whole = tensor.dim() < 2
            yield key, tensor.dtype, tensor.shape if whole else (count, *tensor.shape[1:])

    def _header(self) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name in self.checkpoint.tensors:
            for key, dtype, shape in self._shapes(name):
                stop = start + dtype.itemsize * int(torch.Size(shape).numel())
                entries[key] = {
                    "dtype": DTYPE_NAMES[dtype],
                    "shape": list(shape),
                    "data_offsets": [start, stop],
                }
                start = stop
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)  # so that tensors are aligned
        return struct.pack("<Q", len(text)) + text


def _write(stream: BinaryIO, tensor: torch.Tensor) -> None:
    stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
