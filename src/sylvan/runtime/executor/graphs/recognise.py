"""What modules of other people compute, found by trying them: names say nothing that binds.

Shapes: D columns of a row, F columns between two matrices.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels.api import ActivationKind
from sylvan.runtime.models.skeleton import UNTRACEABLE

_ACTS: Mapping[ActivationKind, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
    }
)
_OFFSETS = 0.0, 1.0  # Gemma's norms multiply by one more than their weight
_NORM_BOUND = 1e-5  # in float32, of rows of order 1
_LARGEST_EPS = 1e-2


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: a row over its root mean square, times `weight` (D,) plus `offset`."""

    weight: nn.Parameter
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class Gated:
    """down(act(gate(x)) * up(x)); matrices (F, D), (F, D) and (D, F), each with a bias or none."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    act: ActivationKind


def norm_of(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    """The norm that a module is, if it is one: tried in float32 on rows of several sizes."""
    weights = dict(module.named_parameters())
    weight = weights.get("weight")
    if len(weights) != 1 or weight is None or weight.dim() != 1 or weight.dtype != dtype:
        return None
    if not _of_one_tensor(module) or any(True for _ in module.buffers()):
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 1e-3, 30.0, 1e-2])[:, None]
    x = torch.randn(4, len(weight), generator=generator) * sizes
    kept, found = _tried(module, x[None].to(dtype)), _tried(copy.deepcopy(module).float(), x[None])
    if kept is None or found is None:
        return None
    numbers = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < _LARGEST_EPS}
    for eps, offset in itertools.product(sorted(numbers), _OFFSETS):
        norm = Norm(weight, eps, offset)
        if torch.allclose(found[0], _normed(x, norm), rtol=_NORM_BOUND, atol=_NORM_BOUND):
            return norm
    return None


def gated_of(module: nn.Module, dtype: torch.dtype) -> Gated | None:
    """The gated product that a module is, if it is one: the same bits as from its own parts."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    if len(linears) != 3 or any(x.weight.dtype != dtype or x.weight.is_meta for x in linears):
        return None
    own = {id(parameter) for linear in linears for parameter in linear.parameters()}
    if {id(p) for p in module.parameters()} != own or not _of_one_tensor(module):
        return None
    for gate, up, down in itertools.permutations(linears):
        shapes = gate.weight.shape, up.weight.shape, down.weight.shape[::-1]
        if len(set(shapes)) > 1 or (gate.bias is None) != (up.bias is None):
            continue
        if (act := _gate(module, gate, up, down)) is not None:
            return Gated(gate, up, down, act)
    return None


def _gate(
    module: nn.Module, gate: nn.Linear, up: nn.Linear, down: nn.Linear
) -> ActivationKind | None:
    """By which function a module gates, if these are its parts."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(1, 3, gate.in_features, generator=generator).to(gate.weight.dtype)
    found = _tried(module, x)
    if found is None:
        return None
    with torch.inference_mode():
        opened, passed = gate(x), up(x)
        for name, act in _ACTS.items():
            if torch.equal(down(act(opened) * passed), found):
                return name
    return None


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return x * inverse * (norm.weight.detach().float() + norm.offset)


def _of_one_tensor(module: nn.Module) -> bool:
    """Whether a module is called with one argument and nothing else."""
    taken = inspect.signature(module.forward).parameters.values()
    return [p.kind for p in taken] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _tried(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What a module makes of x, if that is a tensor of the same kind."""
    try:
        with torch.inference_mode():
            found: Any = module(x)
    except UNTRACEABLE:
        return None
    same = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (x.shape, x.dtype)
    return found if same else None
