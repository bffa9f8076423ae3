"""JetMoE: experts in attention, too.

A router selects the projections: each selected expert computes a query per key head, and projects
the attention results back.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, Routing, TracedTensor, Unsupported
from sylvan.kernels.experts.routing import route
from sylvan.kernels.paged import reference
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.linear import ColumnParallel, Linear
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.moe import MoE
from sylvan.runtime.layers.routed import RoutedProjection
from sylvan.runtime.models.config import ModelConfig, MoEConfig, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder, Ropes, make_mlp
from sylvan.runtime.models.hybrid import HybridBlock

Raw = dict[str, Any]


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `JetMoeForCausalLM`."""
    layers, top_k = raw.get("num_hidden_layers") or 0, raw.get("num_experts_per_tok", 2)
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts", 8),
        top_k=top_k,
        inner=raw.get("intermediate_size") or 0,
        scores="softmax_chosen",
        layers=tuple(range(layers)),
    )
    sizes = {
        "num_attention_heads": (raw.get("num_key_value_heads") or 1) * top_k,
        "head_dim": raw.get("kv_channels", 128),
        "hidden_act": raw.get("activation_function", "silu"),
        "rms_norm_eps": 1e-6,  # transformers ignores the value in config.json
    }
    tied = bool(raw.get("tie_word_embeddings", True))
    return make_config(common_fields(raw | sizes) | {"moe": moe, "tie_word_embeddings": tied})


class _Stack(nn.Module):
    """One matrix per expert."""

    def __init__(self, build: Build, *sizes: int | Split) -> None:
        super().__init__()
        self.weight = build.empty(*sizes)


class _Router(nn.Module):
    def __init__(self, build: Build, dim: int, count: int) -> None:
        super().__init__()
        self.layer = Linear(build, dim, (count,), bias=False)


class _Projections(nn.Module):
    """Routed matrices, and a bias of the output."""

    def __init__(self, dim: int, width: Split, build: Build, count: int) -> None:
        super().__init__()
        self.bias = build.empty(dim)
        self.input_linear = _Stack(build, count, width, dim)
        self.output_linear = _Stack(build, count, dim, width)
        self.router = _Router(build, dim, count)


class RoutedHeads(RoutedProjection):
    """Attention with routed query heads. Shape: (T, D) -> (T, D)."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__()
        assert config.moe is not None
        self.row_groups, count = build.mesh.row_groups, config.num_key_value_heads
        heads = build.mesh.heads(count, count).keys
        width, dim = heads.times(config.head_dim), config.hidden_size
        self.experts = _Projections(dim, Split(width), build, config.moe.num_experts)
        self.kv_proj = ColumnParallel(build, dim, Split(width, width))
        self._rope, self._heads = ropes.of(layer), heads.size
        self._ranks = build.mesh.sharing(heads)
        self._routing = Routing(top_k=config.moe.top_k, scores="softmax_chosen")
        self._layer = AttentionLayer(
            index=layer,
            num_heads=heads.size * config.moe.top_k,
            num_kv_heads=heads.size,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            raise Unsupported("attention with routed heads")
        if self.row_groups is None:
            return self.of_rows(x_TD, batch)
        compute: Any = self.of_rows
        return cast("torch.Tensor", self.row_groups.attend(compute, x_TD, batch))

    def of_rows(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`forward` for rows whose KV this rank has."""
        part, heads = self.experts, self._heads
        ids_TK, weights_TK = route(part.router.layer(x_TD, out_f32=True), self._routing)
        every_TKD = x_TD[:, None].expand(-1, ids_TK.shape[1], -1)
        q_TKC = self._chosen(every_TKD, part.input_linear, ids_TK)
        q_TNH = q_TKC.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(1, 2)  # by key head
        k, v = (y.unflatten(-1, (heads, -1)) for y in self.kv_proj(x_TD).chunk(2, -1))
        q_TNH, k = (
            reference.rotate(y.float(), batch.positions_T, self._rope).to(x_TD.dtype)
            for y in (q_TNH, k)
        )
        out_TNH = batch.attention.run(self._layer, q_TNH, k, v.contiguous(), batch)
        seen_TKC = out_TNH.unflatten(1, (heads, -1)).transpose(1, 2).flatten(2)
        found_TKD = self._chosen(seen_TKC, part.output_linear, ids_TK)
        out_TD = (found_TKD.float() * weights_TK[..., None]).sum(1)
        if self._ranks.size > 1:
            out_TD = ops.all_reduce(out_TD, self._ranks)
        return (out_TD + part.bias.float()).to(x_TD.dtype)

    def _chosen(self, x_TKC: torch.Tensor, stack: _Stack, ids_TK: torch.Tensor) -> torch.Tensor:
        """Each row times the matrix of its expert."""
        found = self.product(x_TKC.flatten(0, 1), stack.weight, ids_TK.flatten())
        return found.unflatten(0, tuple(ids_TK.shape))


class BiasedMoE(nn.Module):
    """Experts, and a bias of their sum."""

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        self.inner = make_mlp(config, build, layer)
        assert isinstance(self.inner, MoE)
        self.bias = build.empty(config.hidden_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            raise Unsupported("a bias of experts")
        return self.inner(x_TD) + self.bias


class JetMoe(Decoder):
    """Maps tensor names; experts are stored as stacks."""

    fused: ClassVar = {}
    stacked: ClassVar[bool] = True

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        heads = RoutedHeads(config, build, layer, ropes)
        mlp = BiasedMoE(config, build, layer)
        return HybridBlock(config, build, "self_attention", heads, mlp)

    def source_name(self, source: str) -> str:
        """The checkpoint's names of parts."""
        for ours, theirs in (
            (".mlp.inner.gate.", ".mlp.router.layer."),
            (".mlp.inner.experts.gate_up_proj", ".mlp.input_linear.weight"),
            (".mlp.inner.experts.down_proj", ".mlp.output_linear.weight"),
        ):
            source = source.replace(ours, theirs)
        return source


MODEL = JetMoe
