"""Finds a model's packed weights in the directory `load_cache`."""

from __future__ import annotations

import msgspec
import torch
import xxhash

from sylvan import __version__
from sylvan.config.load_cache import WEIGHTS, file_name
from sylvan.kernels.cache_files import CacheFiles
from sylvan.kernels.native.library import ops_digest
from sylvan.kernels.native.weight_file import PackedWeightFile
from sylvan.runtime.executor.early.key import checkpoint_files, code_digest
from sylvan.runtime.executor.parts import ModelPlan
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.models.shards import expert_selection
from sylvan.runtime.models.slots import slots

_LAYOUT = 2
"""Increment when the layout or the values of packed weights change."""


def packed_weight_file(plan: ModelPlan, variant: str) -> PackedWeightFile | None:
    """The file for this model's packed weights, which may not exist yet.

    Returns None without `load_cache` or with random weights.

    Args:
        plan: The model.
        variant: Variant of the kernels: machines that share a directory may round differently.
    """
    folder, options = plan.options.load_cache, plan.options
    if folder is None or options.load_format == "dummy":
        return None
    mesh = plan.build.mesh.tp
    said = {
        # rounding depends on PyTorch's version
        "versions": (_LAYOUT, __version__, str(torch.__version__), code_digest()),
        "kernels": (variant, ops_digest()),
        "files": checkpoint_files(plan.model_dir),
        "dtype": str(plan.build.dtype),
        "quantization": options.quantization,
        "load_format": options.load_format,
        "headless": options.headless,
        "rank": (mesh.rank, mesh.size, plan.build.mesh.attention_dp, _dense(plan.build.mesh)),
        "stage": (plan.stage.number, plan.stage.count),
        "experts": _experts(plan),
    }
    digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(said))
    name = file_name(plan.model_dir, digest, WEIGHTS)
    inherited = plan.memory is not None and plan.memory.file == folder / name
    blob = plan.memory.weights if plan.memory is not None and inherited else None
    return PackedWeightFile.open(CacheFiles(folder, options.load_cache_share), name, blob)


def _dense(mesh: Mesh) -> int:
    """Number of ranks that share dense feed-forward blocks."""
    return (mesh.dense or mesh.tp).size


def _experts(plan: ModelPlan) -> list[tuple[int, ...]]:
    """Expert ids of this rank by layer; empty if every rank holds shares of all experts."""
    stacks = (slot for slot in slots(plan.skeleton()) if expert_selection(slot.splits) is not None)
    return [own.numbers for slot in stacks if (own := expert_selection(slot.splits)) is not None]
