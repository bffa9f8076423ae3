"""Mixture-of-experts feed-forward: router, experts, and shared experts.

Shapes: T rows, D hidden, E experts, F inner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import ActivationKind, ClampForm, Clamping, LinearWeight, X
from sylvan.kernels.experts import ExpertRanks, ExpertWeights, Routing
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.mesh import IndexSelection, Split
from sylvan.runtime.layers.mlp import ClampedMLP, GatedMLP
from sylvan.runtime.layers.placement import LayerSlots


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEShape:
    """Sizes and switches of one layer. `shared`: columns of the shared experts, 0 if none."""

    dim: int
    inner: int
    num_experts: int
    routing: Routing
    act: ActivationKind
    shared: int = 0
    shared_gate: bool = False
    correction: bool = False  # a bias used for selecting experts only
    router_bias: bool = False
    expert_bias: bool = False
    alpha: float = 1.0
    limit: float | None = None
    shared_limit: float | None = None
    clamp: ClampForm = "gpt_oss"
    layer: int = 0

    @property
    def clamping(self) -> Clamping | None:
        """Limits of routed experts."""
        return None if self.limit is None else Clamping(self.limit, self.clamp, self.alpha)


class Router(Linear):
    """Computes a logit per expert; `e_score_correction_bias` changes the selection only."""

    def __init__(self, build: Build, shape: MoEShape) -> None:
        super().__init__(build, shape.dim, (shape.num_experts,), bias=shape.router_bias)
        self.e_score_correction_bias = build.empty(shape.num_experts) if shape.correction else None


class Experts(nn.Module):
    """Weights of all experts, stacked. Checkpoints store single experts or the stack.

    Loading may replace each by any `LinearWeight` of the same shape. Ranks hold a share of the
    inner columns of every expert, whose products are summed over ranks; or groups of ranks hold
    different experts (`expert_ranks`). `lora` are the adapter slots of both stacks, if requests may
    use adapters.
    """

    gate_up_proj: LinearWeight
    down_proj: LinearWeight
    gate_up_proj_bias: LinearWeight | None
    down_proj_bias: LinearWeight | None
    lora: tuple[LoraLayer, LoraLayer] | None = None
    expert_ranks: ExpertRanks | None = None

    def __init__(self, build: Build, shape: MoEShape) -> None:
        super().__init__()
        mesh, dim = build.mesh, shape.dim
        count: int | Split = shape.num_experts
        slots = mesh.experts(shape.num_experts, shape.layer)
        if slots is not None:
            if mesh.dispatcher is not None:
                mesh.dispatcher.reserve(dim, shape.routing.top_k, build.dtype)
            self.expert_ranks = _expert_ranks(build, slots)
            count = IndexSelection(
                shape.num_experts, slots.of_group(mesh.tp.rank // mesh.column_ranks)
            )
        inner = mesh.expert_columns(shape.inner, "columns of an expert")
        both = Split(inner, inner)
        self.gate_up_proj = build.empty(count, both, dim)
        self.down_proj = build.empty(count, dim, Split(inner))
        self.gate_up_proj_bias = build.empty(count, both) if shape.expert_bias else None
        self.down_proj_bias = build.empty(count, dim) if shape.expert_bias else None
        self.layer = shape.layer
        self._shape = shape
        self._adds_bias = mesh.adds_expert_bias  # once in the sum over ranks

    def weights(self) -> ExpertWeights:
        """The weights as operands of the op."""
        return ExpertWeights(
            gate_up=self.gate_up_proj,
            down=self.down_proj,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias if self._adds_bias else None,
            act=self._shape.act,
            clamping=self._shape.clamping,
            lora=self.lora,
            expert_ranks=self.expert_ranks,
        )


def _expert_ranks(build: Build, slots: LayerSlots) -> ExpertRanks:
    mesh = build.mesh
    copies = mesh.ep if mesh.placement is not None and mesh.placement.copies else 1
    table = torch.from_numpy(slots.table(copies)).to(build.device)
    return ExpertRanks(
        ranks=mesh.tp,
        groups=mesh.ep,
        per_group=slots.per_group,
        slots_EC=table,
        all_to_all=mesh.all_to_all,
        dispatcher=mesh.dispatcher,
    )


class MoE(nn.Module):
    """Routes each row to a few experts. `load` (E,) counts the rows of each expert so far."""

    def __init__(self, build: Build, shape: MoEShape) -> None:
        super().__init__()
        self.gate = Router(build, shape)
        self.experts = Experts(build, shape)
        self.shared_experts = self.shared_expert_gate = None
        if shape.shared and shape.shared_limit is not None:
            sizes, clamping = (shape.dim, shape.shared), Clamping(shape.shared_limit, shape.clamp)
            self.shared_experts = ClampedMLP(build, sizes, shape.act, clamping)
        elif shape.shared:
            self.shared_experts = GatedMLP(build, shape.dim, shape.shared, shape.act)
        if shape.shared_gate:
            self.shared_expert_gate = Linear(build, shape.dim, (1,), bias=False)
        self.load = torch.zeros(shape.num_experts, dtype=torch.int64, device=build.device)
        self._routing, self._ranks = shape.routing, build.mesh.tp

    def forward(self, x_TD: X) -> X:
        """Shape: (T, D) -> (T, D)."""
        logits_TE = self.gate(x_TD, out_f32=True)
        routing = replace(self._routing, bias=self.gate.e_score_correction_bias)
        return self.routed(x_TD, logits_TE, routing)

    def routed(self, x_TD: X, logits_TE: X, routing: Routing) -> X:
        """Apply the selected and the shared experts. Shape: (T, D) -> (T, D)."""
        out_TD = ops.experts(x_TD, logits_TE, routing, self.experts.weights(), self.load)
        if self._ranks.size > 1 and self.experts.expert_ranks is None:
            out_TD = ops.all_reduce(out_TD, self._ranks)
        if self.shared_experts is None:
            return out_TD
        shared_TD = self.shared_experts(x_TD)
        if self.shared_expert_gate is not None:
            open_T1 = ops.activation(self.shared_expert_gate(x_TD), "sigmoid")
            shared_TD = ops.scale_rows(shared_TD, open_T1)
        return ops.add(out_TD, shared_TD)


class HasExpertLoad(Protocol):
    """A layer of experts that counts the rows of each: `load`, (E,)."""

    experts: Experts
    load: torch.Tensor


def expert_layers_of(model: nn.Module) -> dict[int, HasExpertLoad]:
    """The layers of a model that count the rows of experts, by layer number."""
    return {part.experts.layer: part for part in _counting(model).values()}


def expert_load(model: nn.Module) -> dict[str, torch.Tensor]:
    """Rows of each expert since the model was built, by layer name."""
    return {name: part.load for name, part in _counting(model).items()}


def _counting(model: nn.Module) -> dict[str, HasExpertLoad]:
    return {
        name: cast("HasExpertLoad", part)
        for name, part in model.named_modules()
        if isinstance(getattr(part, "experts", None), Experts)
        and isinstance(getattr(part, "load", None), torch.Tensor)
    }
