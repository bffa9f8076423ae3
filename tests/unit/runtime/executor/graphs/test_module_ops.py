"""Traced modules become ops that compute the same, or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AriaTextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM3VLTextConfig,
    NemotronHConfig,
    Phi3Config,
    Qwen3MoeConfig,
)
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.models.t5.modeling_t5 import T5LayerNorm

from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native import opset
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.kernels.native.opset import Function
from sylvan.kernels.native.schema import Op
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.executor.graphs.module_ops import ModuleOps, experts_of, norm_of
from sylvan.runtime.executor.graphs.module_trace import INPUT, plain, trace_module

try:
    load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

BF16 = torch.bfloat16
LIMITS = ProgramLimits(max_tokens=16, max_outputs=1)


def varied(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    return module


class Shifted(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + 0.01


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
        if self.kind == "scaled":
            return found * self.scale
        if self.kind == "wide":
            return found.double()
        return (found,) if self.kind == "tuple" else found


def ops_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[Op]:
    """The ops of a module; raises if it has none."""
    parameters = dict(module.named_parameters())
    cols = next(iter(parameters.values())).shape[-1]
    node = trace_module(module, cols, dtype)
    tracer = NativeTracer(dtype, LIMITS, {}, load().constants)
    ModuleOps(tracer.input(cols, tracer.dtype), parameters).emit(node)
    return tracer.graph.ops


def kinds_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> list[type]:
    return [type(op) for op in ops_of(module, dtype)]


class ByRoot(LlamaRMSNorm):
    """Divides by a root, of products, and keeps its order."""

    def forward(self, hidden_states):
        mean = (hidden_states * hidden_states).mean(dim=-1, keepdim=True)
        return self.weight * (hidden_states / torch.sqrt(self.variance_epsilon + mean))


class ByPower(LlamaRMSNorm):
    def forward(self, hidden_states):
        mean = hidden_states.float().square().mean([-1], keepdim=True)
        scaled = hidden_states.float() * torch.pow(mean + self.variance_epsilon, -0.5)
        return (scaled * (1.0 + self.weight.float())).type_as(hidden_states)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("module", "eps", "offset"),
    [
        (lambda: LlamaRMSNorm(40, eps=1e-6), 1e-6, 0.0),
        (lambda: LlamaRMSNorm(40, eps=1e-5), 1e-5, 0.0),
        (lambda: nn.RMSNorm(40, eps=1e-5), 1e-5, 0.0),
        (lambda: T5LayerNorm(40, eps=1e-6), 1e-6, 0.0),
        (lambda: GemmaRMSNorm(40, eps=1e-6), 1e-6, 1.0),
        (lambda: ByRoot(40, eps=1e-6), 1e-6, 0.0),
        (lambda: ByPower(40, eps=1e-6), 1e-6, 1.0),
    ],
)
def test_norms_are_one_op_however_they_are_spelled(module, eps, offset, dtype):
    made = varied(module()).to(dtype)
    norm = norm_of(plain(trace_module(made, 40, dtype)))

    assert norm is not None
    assert norm.weight.args == ("weight",)
    assert (norm.x.function, norm.eps, norm.offset, norm.centred) == (INPUT, eps, offset, False)
    assert kinds_of(made, dtype) == [opset.RmsNorm]


def test_layer_norms_are_one_op():
    made = varied(nn.LayerNorm(40, eps=1e-6))

    (op,) = ops_of(made)

    assert type(op) is opset.LayerNorm
    assert op.eps == pytest.approx(1e-6)


class OverRows(LlamaRMSNorm):
    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-2, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class OfAnother(LlamaRMSNorm):
    """Divides by the size of something else."""

    def forward(self, hidden_states):
        variance = (hidden_states + hidden_states).pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.PReLU(40),
        lambda: Shifted(40),
        lambda: Breaking(40),
        lambda: OverRows(40),
        lambda: OfAnother(40),
        lambda: nn.BatchNorm1d(3),
    ],
)
def test_a_module_that_computes_something_else_has_no_ops(module):
    with pytest.raises(Unsupported):
        ops_of(varied(module()))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", Function.SILU),
        ("gelu", Function.GELU),
        ("gelu_pytorch_tanh", Function.GELU_TANH),
        ("relu", Function.RELU),
        ("relu2", Function.RELU2),
    ],
)
def test_gated_mlps_are_three_ops(name, function, dtype):
    config = LlamaConfig(hidden_size=64, intermediate_size=160, hidden_act=name)
    first, glu, last = ops_of(varied(LlamaMLP(config)).to(dtype), dtype)

    assert (type(first), type(glu), type(last)) == (opset.Linear, opset.Glu, opset.Linear)
    assert (first.cols, first.outputs, glu.function) == (64, 320, function)


def test_mlps_whose_gate_is_stored_with_what_it_opens_are_three_ops():
    config = Phi3Config(hidden_size=64, intermediate_size=160)
    assert kinds_of(Phi3MLP(config)) == [opset.Linear, opset.Glu, opset.Linear]


def test_mlps_without_a_gate_are_ops_too():
    config = GPTNeoXConfig(hidden_size=64, intermediate_size=160)
    assert kinds_of(GPTNeoXMLP(config)) == [opset.Linear, opset.Activation, opset.Linear]


def test_parts_are_distinguished_by_what_they_do():
    module = varied(Swapped())
    emitted = emitted_by(module)

    stacked = [names for weight, names in emitted.packed if isinstance(weight, DeferredWeight)]
    assert stacked == [["b.weight", "a.weight"], ["c.weight"]]
    weight = emitted.packed[0][0]
    assert torch.equal(weight.load(), torch.cat((module.b.weight, module.a.weight)))


def emitted_by(module: nn.Module) -> ModuleOps:
    tracer = NativeTracer(torch.float32, LIMITS, {}, load().constants)
    emitted = ModuleOps(tracer.input(12, "f32"), dict(module.named_parameters()))
    emitted.emit(trace_module(module, 12, torch.float32))
    return emitted


def test_a_sum_is_an_op():
    kinds = kinds_of(varied(Swapped("residual")))
    assert kinds == [opset.Linear, opset.Glu, opset.Linear, opset.Add]


@pytest.mark.parametrize("kind", ["scaled", "tuple", "wide"])
def test_mlps_that_do_something_else_have_no_ops(kind):
    with pytest.raises(Unsupported):
        ops_of(varied(Swapped(kind)))


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

    found = experts_of(module, dtype)

    assert found is not None
    assert found.gate_up is module.gate_up_proj
    assert found.down is module.down_proj
    assert (found.act, found.transposed) == (act, False)
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("way", ["eager", "batched_mm", "grouped_mm"])
def test_how_transformers_computes_experts_makes_no_difference(way):
    module = made_experts()
    module.config._experts_implementation = way

    assert experts_of(module, torch.float32) is not None


def test_transposed_stacks_are_found_too():
    found = experts_of(made_experts(AriaExperts, AriaTextConfig), torch.float32)

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
    assert experts_of(module(), torch.float32) is None
