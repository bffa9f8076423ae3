"""Checks whether a model can be divided among ranks, without loading it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from sylvan.kernels.api import AttentionLayer
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.cross import CrossAttention
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.mesh import Mesh, UnconnectedRank
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Attention
from sylvan.runtime.models.jetmoe import RoutedHeads
from sylvan.runtime.models.registry import family_of
from sylvan.runtime.models.stages import check_stages, num_last_layers

MAX_RANKS = 64


def check_division(config: ModelConfig, mesh: Mesh) -> None:
    """Reject a model that cannot be split over that many ranks.

    Raises:
        ConfigError: names what does not divide, and the possible rank counts.
    """
    check_stages(config, mesh.stage.count)
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
    if mesh.dense is not None and config.moe is None:
        raise ConfigError(
            f"parallel.moe_dense_tp={mesh.dense.size}: {config.architecture} has no experts; leave "
            "it out"
        )
    _check_attention_dp(config, mesh)
    if not (why := _obstacle(config, mesh, size)):
        return
    if why.startswith("parallel."):
        raise ConfigError(why)
    sizes = [str(n) for n in range(1, MAX_RANKS + 1) if not _obstacle(config, mesh, n)]
    counts = ", ".join(sizes) or "none"
    raise ConfigError(f"parallel.tp={size}: {why}; this model divides by {counts}")


def same_bits_obstacle(config: ModelConfig, mesh: Mesh) -> str:
    """Why a model's sums cannot be those of any number of ranks; empty if they can be.

    `mesh`: only its sizes count.
    """
    if mesh.tp.size == 1 or config.path != "native":
        return ""
    return _obstacle(config, replace(mesh, same_bits=True), mesh.tp.size)


def on_stage(mesh: Mesh, config: ModelConfig) -> Mesh:
    """Return the mesh of the ranks whose pipeline stages hold the layers of this model."""
    if mesh.stage.count == 1:
        return mesh
    last = num_last_layers(config, mesh.stage.count)
    sizes = {"num_layers": config.num_hidden_layers, "dim": config.hidden_size}
    return replace(mesh, stage=replace(mesh.stage, num_last=last, **sizes))


def _obstacle(config: ModelConfig, mesh: Mesh, size: int) -> str:
    """Name the dimension that does not divide evenly; empty if all do."""
    if size % mesh.ep:
        return f"{size} ranks do not divide into parallel.ep={mesh.ep} groups"
    there = Mesh(UnconnectedRank(size), mesh.ep, mesh.placement, mesh.same_bits)
    if mesh.dense is not None:
        if size % mesh.dense.size:
            return f"{size} ranks do not divide into parallel.moe_dense_tp={mesh.dense.size}"
        there = replace(there, dense=UnconnectedRank(mesh.dense.size))
    if (groups := mesh.attention_dp) > 1:
        if size % groups:
            return f"{size} ranks do not divide into parallel.attention_dp={groups} groups"
        there = replace(there, attention=UnconnectedRank(size // groups))
    try:
        family_of(config).model(config, _on_meta(there))
    except ConfigError as error:
        return str(error)
    return ""


def _check_attention_dp(config: ModelConfig, mesh: Mesh) -> None:
    """Reject a model whose attention cannot be computed for a subset of the requests.

    Raises:
        ConfigError: says why.
    """
    if mesh.attention is None:
        return
    reasons = {
        "keeps recurrent states": bool(config.states),
        "has bidirectional attention": not config.causal,
        "takes images or audio": config.media is not None,
    }
    why = next((why for why, is_so in reasons.items() if is_so), "")
    alone = _on_meta(Mesh(attention=UnconnectedRank(1)))
    if not why and not _divides_rows(family_of(config).model(config, alone)):
        why = "has attention layers that do not support it"
    if why:
        raise ConfigError(
            f"parallel.attention_dp={mesh.attention_dp}: {config.architecture} {why}, and its "
            "ranks cannot have different requests; use parallel.attention_dp=1"
        )


def why_together(config: ModelConfig) -> str:
    """Return why groups of devices cannot serve different requests; empty if they can."""
    reasons = {
        "keeps recurrent states": bool(config.states),
        "returns embeddings or labels": not config.causal or config.head != "lm",
        "takes images or audio, or has an encoder": config.media is not None,
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


def _divides_rows(model: nn.Module) -> bool:
    """Whether every layer with KV is inside a module that supports `RowGroups`."""
    asking = [
        part
        for part in model.modules()
        if type(part) is LatentAttention
        or (isinstance(part, Attention) and type(part).forward is Attention.forward)
        or isinstance(part, RoutedHeads)
    ]
    inside = {inner for part in asking for inner in part.modules()}
    return all(part in inside for part in model.modules() if _keeps_kv(part))


def _keeps_kv(part: nn.Module) -> bool:
    known = isinstance(part, PagedAttention | LatentAttention | CrossAttention)
    return known or any(isinstance(value, AttentionLayer) for value in vars(part).values())


def _on_meta(mesh: Mesh) -> Build:
    return Build(dtype=torch.float32, length=1, device=torch.device("meta"), mesh=mesh)
