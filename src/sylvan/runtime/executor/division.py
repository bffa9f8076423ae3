"""Checks whether a model can be divided among ranks, without loading it."""

from __future__ import annotations

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.mesh import Mesh, NoRanks
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.registry import family_of

MOST_RANKS = 64


def check_division(config: ModelConfig, mesh: Mesh) -> None:
    """Reject a model that cannot be split over that many ranks.

    Raises:
        ConfigError: names what does not divide, and the possible rank counts.
    """
    size = mesh.tp.size
    if size == 1:
        return
    if config.path != "native":
        raise ConfigError(
            f"parallel.tp={size}: {config.architecture} runs through transformers, whose layers "
            "cannot be divided among ranks; use parallel.tp=1"
        )
    if mesh.ep > 1 and config.moe is None:
        raise ConfigError(
            f"parallel.ep={mesh.ep}: {config.architecture} has no experts; leave parallel.ep at 1"
        )
    if not (why := _obstacle(config, mesh, size)):
        return
    if why.startswith("parallel."):
        raise ConfigError(why)
    sizes = [str(n) for n in range(1, MOST_RANKS + 1) if not _obstacle(config, mesh, n)]
    counts = ", ".join(sizes) or "none"
    raise ConfigError(f"parallel.tp={size}: {why}; this model divides by {counts}")


def _obstacle(config: ModelConfig, mesh: Mesh, size: int) -> str:
    """Name of what does not divide evenly; empty if everything does."""
    if size % mesh.ep:
        return f"{size} ranks do not divide into parallel.ep={mesh.ep} groups"
    there = Mesh(NoRanks(size), mesh.ep, mesh.placement, mesh.same_bits)
    build = Build(dtype=torch.float32, length=1, device=torch.device("meta"), mesh=there)
    try:
        family_of(config).model(config, build)
    except ConfigError as error:
        return str(error)
    return ""
