"""Tiny checkpoints for weight updates, as files, as bytes and in shared memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save, save_file

from sylvan.protocol.commands import BytesTensors, CommandResult, ExecutorCommand
from sylvan.runtime.engine.commands import Commands
from sylvan.runtime.models.in_memory import InMemory
from tests.parity.serving import Serving

PROMPTS = [[5, 9, 150, 31], [7] * 37]


class Shifting(InMemory):
    """A source whose tensor is valid when first read, and full of NaN afterwards."""

    def __init__(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        super().__init__(tensors)
        self._name, self._reads = name, 0

    def tensor(self, name: str) -> torch.Tensor:
        found = super().tensor(name)
        self._reads += name == self._name
        return found * torch.nan if name == self._name and self._reads > 1 else found


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(weights: dict[str, torch.Tensor], seed: int = 3) -> dict[str, torch.Tensor]:
    """Return other contents for the same names, shapes and types; shared tensors stay shared."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(value.shape, generator=generator) * 0.1 + (value.dim() == 1)).to(
            value.dtype
        )
        for name, value in weights.items()
    }


def write_changed(source: Path, folder: Path, seed: int = 3) -> Path:
    """The same model with other weights."""
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(changed(weights_in(source), seed), folder / "model.safetensors")
    return folder


def as_bytes(weights: dict[str, torch.Tensor]) -> BytesTensors:
    return BytesTensors(np.frombuffer(save(weights), np.uint8))


def carry_out(serving: Serving, *commands: ExecutorCommand) -> list[CommandResult]:
    """Run commands as the scheduler's loop does."""
    path = Commands(serving.scheduler, serving.executor)
    for number, command in enumerate(commands):
        path.add(number, command)
    found: list[CommandResult] = []
    while len(found) < len(commands):
        if (done := path.poll()) is not None:
            found.append(done[2])
    if not path.blocked:
        serving.scheduler.resume()
    return found
