"""Recognises the computation of third-party modules numerically; class names are not trusted.

Shapes: T rows, D columns of a row, F intermediate columns, E experts, C experts per row.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
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
_OFFSETS = 0.0, 1.0  # Gemma's norms multiply by (1 + weight)
_NORM_BOUND = 1e-5  # in float32, of rows of order 1
_LARGEST_EPS = 1e-2
_EXPERTS_BOUND = 2e-5  # in float32, of whole rows
_SIZES = 1.0, 0.1, 30.0, 1e4  # scales of trial rows; only large values reveal clamps


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: a row over its root mean square, times `weight` (D,) plus `offset`."""

    weight: nn.Parameter
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class Gated:
    """down(act(gate(x)) * up(x)); matrices (F, D), (F, D) and (D, F), each with or without bias."""

    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    act: ActivationKind


@dataclass(frozen=True, slots=True)
class ExpertsPattern:
    """Routed experts (gated MLPs): each row gets expert ids and routing weights.

    `gate_up` is (E, 2 F, D), gate then up, and `down` (E, D, F); if `transposed`, (E, D, 2 F) and
    (E, F, D).
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    act: ActivationKind
    transposed: bool


def norm_of(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    """The module as a norm, or None: tried in float32 on rows of several scales."""
    weights = dict(module.named_parameters())
    weight = weights.get("weight")
    if len(weights) != 1 or weight is None or weight.dim() != 1 or weight.dtype != dtype:
        return None
    if not takes(module, 1) or any(True for _ in module.buffers()):
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
    """The module as a gated MLP, or None: must equal the result of its parts bit for bit."""
    linears = [child for child in module.children() if type(child) is nn.Linear]
    if len(linears) != 3 or any(x.weight.dtype != dtype or x.weight.is_meta for x in linears):
        return None
    own = {id(parameter) for linear in linears for parameter in linear.parameters()}
    if {id(p) for p in module.parameters()} != own or not takes(module, 1):
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
    """The activation of the gate, if the module has these parts."""
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


def experts_of(module: nn.Module, dtype: torch.dtype, chosen: int) -> ExpertsPattern | None:
    """The module as routed experts, or None: checked in float32 on random weights.

    Args:
        module: Called with rows (T, D), expert ids (T, C) and routing weights (T, C).
        dtype: Type of its weights.
        chosen: Experts per row.
    """
    stacks = _stacks(module, dtype)
    if len(stacks) != 2 or not takes(module, 3):
        return None
    trial = _Trial.of(module, chosen)
    for (gate_up, down), transposed in itertools.product(
        itertools.permutations(stacks), (False, True)
    ):
        inner, dim = gate_up.shape[1:][::-1] if transposed else gate_up.shape[1:]
        wanted = (inner // 2, dim) if transposed else (dim, inner // 2)
        if inner % 2 or tuple(down.shape) != (len(gate_up), *wanted):
            continue
        one = ExpertsPattern(gate_up, down, "silu", transposed)
        if (act := trial.act_of(module, one)) is not None:
            return replace(one, act=act)
    return None


def _stacks(module: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """The weight stacks of a module; empty if it has other parameters or modules."""
    own = list(module.parameters(recurse=False))
    alone = len(own) == len(list(module.parameters())) and not any(True for _ in module.buffers())
    fit = all(x.dim() == 3 and x.dtype == dtype and not x.is_meta for x in own)
    return own if alone and fit else []


@dataclass(frozen=True, slots=True)
class _Trial:
    """Trial weights for a module's stacks, by name: zero except for a few experts.

    `ids` (T, C) select these experts; `shares` (T, C) are arbitrary routing weights.
    """

    stacks: Mapping[str, torch.Tensor]
    ids: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, chosen: int) -> _Trial:
        """Build a trial for a module that has only weight stacks."""
        generator = torch.Generator().manual_seed(0)
        stacks: dict[str, torch.Tensor] = {}
        count = min(len(stack) for stack in module.parameters())
        few = sorted({0, count // 2, count - 1})
        for name, stack in module.named_parameters():
            values = torch.from_numpy(np.zeros(tuple(stack.shape), np.float32))  # lazily allocated
            for expert in few:
                drawn = torch.randn(*stack.shape[1:], generator=generator)
                values[expert] = drawn / min(stack.shape[1:]) ** 0.5
            stacks[name] = values
        places = torch.arange(len(_SIZES))[:, None] + torch.arange(chosen)
        shares = torch.randn(len(_SIZES), chosen, generator=generator)
        return cls(stacks, torch.tensor(few)[places % len(few)], shares)

    def act_of(self, module: nn.Module, experts: ExpertsPattern) -> ActivationKind | None:
        """The activation of the gate, if the module's stacks are `experts`."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        gate_up, down = (self.stacks[names[id(x)]] for x in (experts.gate_up, experts.down))
        if experts.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(len(_SIZES), gate_up.shape[2], generator=generator)
        x *= torch.tensor(_SIZES)[:, None]
        given = x, self.ids, self.shares
        found = _tried(
            lambda rows: functional_call(module, dict(self.stacks), (rows, *given[1:])), x
        )
        low = x.to(experts.down.dtype)
        if found is None or _tried(lambda rows: module(rows, *given[1:]), low) is None:
            return None
        for name, act in _ACTS.items():
            expected = _visited((gate_up, down), given, act)
            apart = (found - expected).norm(dim=1)
            if bool((apart <= _EXPERTS_BOUND * expected.norm(dim=1)).all()):
                return name
        return None


def _visited(
    stacks: tuple[torch.Tensor, torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Apply experts to rows one by one."""
    (gate_up, down), (x, ids, shares) = stacks, given
    out = torch.zeros_like(x)
    for row, (numbers, parts) in enumerate(zip(ids.tolist(), shares, strict=True)):
        for expert, share in zip(numbers, parts, strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            out[row] += share * (down[expert] @ (act(gate) * up))
    return out


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return x * inverse * (norm.weight.detach().float() + norm.offset)


def takes(module: nn.Module, count: int) -> bool:
    """Whether a module takes exactly this many arguments."""
    taken = inspect.signature(module.forward).parameters.values()
    return [p.kind for p in taken] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * count


def _tried(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor | None:
    """The module's result for x, if it is a tensor of the same shape and type."""
    try:
        with torch.inference_mode():
            found: Any = run(x)
    except UNTRACEABLE:
        return None
    same = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (x.shape, x.dtype)
    return found if same else None
