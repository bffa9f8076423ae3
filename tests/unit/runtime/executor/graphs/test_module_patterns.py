"""Modules are taken for what they compute, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AriaTextConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM3VLTextConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.t5.modeling_t5 import T5LayerNorm

from sylvan.runtime.executor.graphs.module_patterns import experts_of, gated_of, norm_of

BF16 = torch.bfloat16


def varied(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return module


class Shifted(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + 0.01


class WithGate(LlamaRMSNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states)


class Breaking(LlamaRMSNorm):
    def forward(self, hidden_states):
        raise ValueError("made for images")


class Swapped(nn.Module):
    """The gate comes second, and parts have names of their own."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(12, 20)
        self.c = nn.Linear(20, 12)
        self.kind = kind
        if kind == "scaled":
            self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        found = self.c(F.gelu(self.b(x)) * self.a(x))
        if self.kind == "residual":
            return x + found
        return (found,) if self.kind == "tuple" else found


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("module", "eps", "offset"),
    [
        (lambda: LlamaRMSNorm(40, eps=1e-6), 1e-6, 0.0),
        (lambda: LlamaRMSNorm(40, eps=1e-5), 1e-5, 0.0),
        (lambda: nn.RMSNorm(40, eps=1e-5), 1e-5, 0.0),
        (lambda: T5LayerNorm(40, eps=1e-6), 1e-6, 0.0),
        (lambda: GemmaRMSNorm(40, eps=1e-6), 1e-6, 1.0),
    ],
)
def test_norms_are_found_by_what_they_compute(module, eps, offset, dtype):
    made = varied(module()).to(dtype)
    found = norm_of(made, dtype)

    assert found is not None
    assert found.weight is made.weight
    assert (found.eps, found.offset) == (eps, offset)


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.LayerNorm(40, bias=False),
        lambda: nn.PReLU(40),
        lambda: nn.Linear(40, 40, bias=False),
        lambda: Shifted(40),
        lambda: WithGate(40),
        lambda: Breaking(40),
        lambda: nn.Sequential(LlamaRMSNorm(40)),
        lambda: LlamaRMSNorm(40).to(BF16),
    ],
)
def test_what_is_no_norm_of_this_type_is_left_alone(module):
    assert norm_of(varied(module()), torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("name", "act"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)
def test_gated_products_are_found_with_their_function(name, act, dtype):
    config = LlamaConfig(hidden_size=64, intermediate_size=160, hidden_act=name)
    module = varied(LlamaMLP(config)).to(dtype)
    found = gated_of(module, dtype)

    assert found is not None
    assert found.act == act
    assert found.gate is module.gate_proj
    assert found.up is module.up_proj
    assert found.down is module.down_proj


def test_parts_are_distinguished_by_what_they_do():
    module = varied(Swapped())
    found = gated_of(module, torch.float32)

    assert found is not None
    assert (found.gate, found.up, found.down) == (module.b, module.a, module.c)


@pytest.mark.parametrize("kind", ["scaled", "residual", "tuple"])
def test_what_does_more_is_left_alone(kind):
    assert gated_of(varied(Swapped(kind)), torch.float32) is None
    assert gated_of(varied(Swapped()), BF16) is None


class Interleaved(Qwen3MoeExperts):
    """Gates and what passes by turns."""

    def _apply_gate(self, gate_up_out):
        return self.act_fn(gate_up_out[..., ::2]) * gate_up_out[..., 1::2]


class Clamped(Qwen3MoeExperts):
    """Gates up to a limit that rows of order one do not reach."""

    def _apply_gate(self, gate_up_out):
        gate, up = gate_up_out.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=20.0)) * up


class SameShares(Qwen3MoeExperts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        shares = torch.ones_like(top_k_weights)
        return super().forward(hidden_states, top_k_index, shares)


def made_experts(kind: type = Qwen3MoeExperts, config: type = Qwen3MoeConfig, **changes: object):
    """With weights, as a model of transformers has it."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24}
    numbers = dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), 5)
    shape = config(**sizes | numbers | changes)
    shape._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    module = kind(shape)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("name", "act"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)
def test_experts_are_found_with_their_function(name, act, dtype):
    module = made_experts(hidden_act=name).to(dtype)
    before = [parameter.clone() for parameter in module.parameters()]

    found = experts_of(module, dtype, 2)

    assert found is not None
    assert found.gate_up is module.gate_up_proj
    assert found.down is module.down_proj
    assert (found.act, found.transposed) == (act, False)
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("way", ["eager", "batched_mm", "grouped_mm"])
def test_how_transformers_computes_experts_makes_no_difference(way):
    module = made_experts()
    module.config._experts_implementation = way

    assert experts_of(module, torch.float32, 3) is not None


def test_stacks_the_other_way_round_are_found_too():
    found = experts_of(made_experts(AriaExperts, AriaTextConfig), torch.float32, 2)

    assert found is not None
    assert found.transposed


@pytest.mark.parametrize(
    "module",
    [
        lambda: made_experts(Interleaved),
        lambda: made_experts(Clamped),
        lambda: made_experts(SameShares),
        lambda: made_experts(GptOssExperts, GptOssConfig),
        lambda: made_experts(MiniMaxM3VLExperts, MiniMaxM3VLTextConfig),
        lambda: made_experts(NemotronHExperts, NemotronHConfig),
        lambda: made_experts().to(BF16),
        lambda: LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=160)),
    ],
)
def test_other_experts_are_left_alone(module):
    assert experts_of(module(), torch.float32, 2) is None
