"""LongCat-Flash: two rounds of latent attention and mlp per layer; experts overlap the second.

Some experts are the identity (`zero_expert_num`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ExpertRanks, X
from sylvan.kernels.experts.exchange import sum_by_owner
from sylvan.kernels.experts.routing import route
from sylvan.kernels.gating import glu
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.moe import Experts, Router
from sylvan.runtime.layers.routed import RoutedProjection
from sylvan.runtime.models import deepseek
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Decoder, Ropes, moe_shape
from sylvan.runtime.models.deepseek import LatentBlock

Raw = dict[str, Any]

_ROUNDS = 2
_HALVES = re.compile(r"^layers\.(\d+)\.(input_layernorm|post_attention_layernorm|self_attn|mlp)\.")


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `LongcatFlashForCausalLM`."""
    layers = raw.get("num_layers")
    if not isinstance(layers, int):
        raise ConfigError(f"config.json: num_layers must be an integer, it is {layers!r}")
    sizes = {
        "num_hidden_layers": _ROUNDS * layers,
        "intermediate_size": raw.get("ffn_hidden_size"),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-5),
    }
    return deepseek.parse(raw | sizes)


class ZeroMoE(RoutedProjection):
    """Experts, some of which are the identity.

    Every rank adds the identity experts; the others may be divided among groups of ranks.
    """

    load: torch.Tensor | None = None

    def __init__(self, config: ModelConfig, build: Build, layer: int) -> None:
        super().__init__()
        assert config.moe is not None
        shape = moe_shape(config.moe, config, layer)
        self._real = shape.num_experts
        idle = config.raw.get("zero_expert_num") or 0
        every = replace(shape, num_experts=self._real + idle)
        self.gate = Router(build, every)
        self.experts = Experts(build, shape)
        self._routing, self._ranks = shape.routing, build.mesh.tp
        if build.mesh.dispatcher is not None:
            raise ConfigError(
                f"parallel.expert_exchange: {config.architecture} has experts that return their "
                "input, whose rows no library dispatches; use all_gather or all_to_all"
            )
        if self.experts.expert_ranks is not None:
            self.load = torch.zeros(self._real, dtype=torch.int64, device=build.device)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        logits_TE = self.gate(x_TD, out_f32=True)
        routing = replace(self._routing, bias=self.gate.e_score_correction_bias)
        ids_TK, weights_TK = route(logits_TE, routing)
        idle = ids_TK >= self._real
        returned_TD = x_TD.float() * (weights_TK * idle).sum(-1, keepdim=True)
        weights, expert_ranks = self.experts.weights(), self.experts.expert_ranks
        ids_P = (ids_TK if expert_ranks is None else self._held(expert_ranks, ids_TK)).flatten()
        assert isinstance(weights.gate_up, torch.Tensor)
        assert isinstance(weights.down, torch.Tensor)
        x_PD = x_TD[:, None].expand(-1, ids_TK.shape[1], -1).flatten(0, 1)
        inner_PI = glu(self.product(x_PD, weights.gate_up, ids_P), weights.act)
        made_PD = self.product(inner_PI, weights.down, ids_P)  # zeros of those that do nothing
        if expert_ranks is not None:
            pairs = torch.arange(len(made_PD), device=made_PD.device)
            if expert_ranks.all_to_all:
                weights_TK, some_TK = weights_TK.masked_fill(idle, 0.0), ids_TK.masked_fill(idle, 0)
                out_TD = sum_by_owner(expert_ranks, some_TK, made_PD, pairs, weights_TK)
                return (returned_TD + out_TD.float()).to(x_TD.dtype)
            made_PD = expert_ranks.combine(made_PD, pairs, len(made_PD))
        made_TKD = made_PD.float().unflatten(0, tuple(ids_TK.shape))
        out_TD = (made_TKD * weights_TK[..., None]).sum(1)
        if (
            self._ranks.size > 1 and expert_ranks is None
        ):  # each has a share of every expert's columns
            out_TD = ops.all_reduce(out_TD, self._ranks)
        return (returned_TD + out_TD).to(x_TD.dtype)

    def _held(self, expert_ranks: ExpertRanks, ids_TK: torch.Tensor) -> torch.Tensor:
        """The expert of this rank that computes each pair, -1: none; counts rows. Shape: (T, K)."""
        idle = ids_TK >= self._real
        assert self.load is not None
        self.load += ids_TK[~idle].bincount(minlength=self._real)
        return expert_ranks.dispatch(ids_TK.masked_fill(idle, 0)).masked_fill(idle, -1)


class Round(LatentBlock):
    """One round; the first round of a layer also routes its rows to experts."""

    def __init__(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> None:
        super().__init__(config, build, layer, ropes)
        self.experts = None if layer % _ROUNDS else ZeroMoE(config, build, layer)

    def run(
        self,
        x_TD: X,
        residual_TD: X | None,
        batch: ForwardBatch,
        late_TD: X | None,
    ) -> tuple[X, X, X | None]:
        """Return output, residual stream, and the experts' sum, which the next round adds."""
        h_TD, stream_TD = self.input_layernorm(x_TD, residual_TD)
        h_TD = self.self_attn(h_TD, batch)
        h_TD, stream_TD = self.post_attention_layernorm(h_TD, stream_TD)
        if self.experts is not None:
            return self.mlp(h_TD), stream_TD, self.experts(h_TD)
        assert late_TD is not None
        return ops.add(self.mlp(h_TD), late_TD), stream_TD, None


class LongcatFlash(Decoder):
    """A decoder of pairs of rounds."""

    def block(self, config: ModelConfig, build: Build, layer: int, ropes: Ropes) -> nn.Module:
        return Round(config, build, layer, ropes)

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of the multi-token prediction layer, and of identity experts."""
        raw, layers = self.config.raw, range(self.config.num_hidden_layers // _ROUNDS)
        real = raw.get("n_routed_experts") or 1
        idle = range(real, real + (raw.get("zero_expert_num") or 0))
        nothing = (f"layers.{i}.mlp.experts.{e}." for i in layers for e in idle)
        return (*super().unused, "mtp.", *nothing)

    def source_name(self, source: str) -> str:
        """Map names: a layer numbers its rounds, and names its experts `mlp`."""
        found = _HALVES.match(source)
        if found is None:
            return _of_experts(source)
        number, part = int(found[1]), found[2]
        part = "mlps" if part == "mlp" else part
        rest = source[found.end() :]
        return f"layers.{number // _ROUNDS}.{part}.{number % _ROUNDS}.{rest}"

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Fold the scale of latent vectors into their norms."""
        latent, dim = self.config.latent, self.config.hidden_size
        assert latent is not None
        if name.endswith("q_a_layernorm.weight") and latent.q_rank:
            return tensor * (dim / latent.q_rank) ** 0.5
        if name.endswith("kv_a_layernorm.weight"):
            return tensor * (dim / latent.latent) ** 0.5
        return tensor

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        h_TD, residual_TD, late_TD = x_TD, None, None
        for block in self.layers:
            assert isinstance(block, Round)
            h_TD, residual_TD, late_TD = block.run(h_TD, residual_TD, batch, late_TD)
        return self.norm(h_TD, residual_TD)[0]


def _of_experts(source: str) -> str:
    """`layers.6.experts.gate...` of the first round of layer 3 is `layers.3.mlp.router...`."""
    found = re.match(r"^layers\.(\d+)\.experts\.(gate|experts)\.", source)
    if found is None:
        return source
    rest = source[found.end() :]
    start = f"layers.{int(found[1]) // _ROUNDS}.mlp."
    if found[2] == "experts":
        return f"{start}experts.{rest}"
    return f"{start}router.{rest if rest.startswith('e_score') else f'classifier.{rest}'}"


MODEL = LongcatFlash
