"""Native kernels in place of our own layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sylvan.kernels.api import AttentionLayer, LatentShape, Routing
from sylvan.kernels.matmul.weights import DeferredWeight, quantise_int4, quantise_int8
from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.runtime.executor.graphs.layers import use_native_layers
from sylvan.runtime.executor.graphs.native_layers import (
    NativeLayerLinear,
    NativeLayerNorm,
    NativeTable,
)
from sylvan.runtime.executor.graphs.native_modules import MAX_ROWS, NativeRowsModule
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import ColumnParallel, Linear
from sylvan.runtime.layers.mesh import Share
from sylvan.runtime.layers.mlp import MLP, GatedMLP
from sylvan.runtime.layers.moe import MoE, MoEShape
from sylvan.runtime.layers.norm import LayerNorm, RMSNorm
from sylvan.runtime.models.checkpoint import load_deferred

try:
    load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
QUANTISE = {
    "plain": lambda w: w,
    "int8": quantise_int8,
    "int4": lambda w: quantise_int4(w, 32),
}


def built(dtype: torch.dtype) -> Build:
    return Build(dtype=dtype, length=64)


def filled(model: nn.Module) -> nn.Module:
    """Random weights, those of norms about 1."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + drawn / 8 if parameter.dim() == 1 else drawn / 8)
    return model


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    apart = (found.float() - expected.float()).norm()
    assert apart <= DTYPES[dtype] * expected.float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTISE)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_gives_rows_of_both_types(dtype, kind, bias):
    model = filled(nn.Sequential(Linear(built(dtype), 96, (40, 37), bias=bias)))
    weight = model[0].weight.detach().clone()
    if kind != "plain":
        del model[0].weight
        model[0].weight = QUANTISE[kind](weight)
    x = torch.randn(70, 96).to(dtype)
    expected = model[0](x), model[0](x, out_f32=True)

    assert use_native_layers(model, dtype, 2) is not None

    assert type(model[0]) is NativeLayerLinear
    near(model[0](x), expected[0], dtype)
    near(model[0](x, out_f32=True), expected[1], dtype)
    assert model[0].weight.is_meta


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTISE)
@pytest.mark.parametrize("block", [GatedMLP, MLP])
def test_blocks_are_one_call_and_rows_do_not_see_each_other(dtype, kind, block):
    build = built(dtype)
    model = filled(nn.ModuleDict({"one": block(build, 64, 96, "silu", bias=True)}))
    for linear in model["one"].children():
        weight = QUANTISE[kind](linear.weight.detach().clone())
        if kind != "plain":
            del linear.weight
            linear.weight = weight
    x = torch.randn(MAX_ROWS + 5, 64).to(dtype)
    expected = model["one"](x[:20])

    assert use_native_layers(model, dtype, 2) is not None

    assert type(model["one"]) is NativeRowsModule
    whole = model["one"](x)
    # A level of a quantised row may round the other way.
    near(whole[:20], expected, dtype if kind == "plain" else torch.bfloat16)
    rows = [0, 1, 19, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 4]
    assert torch.equal(torch.cat([model["one"](x[i : i + 1]) for i in rows]), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_counted_as_before(dtype):
    shape = MoEShape(
        dim=64, inner=32, num_experts=5, routing=Routing(top_k=2), act="silu", shared=32
    )
    model = filled(nn.ModuleDict({"one": MoE(built(dtype), shape)}))
    load_E = model["one"].load
    x = torch.randn(9, 64).to(dtype)
    expected, counted = model["one"](x), load_E.clone()

    assert use_native_layers(model, dtype, 1) is not None

    near(model["one"](x), expected, dtype)
    assert torch.equal(load_E, 2 * counted)
    assert int(counted.sum()) == 18


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_take_what_they_took(dtype, norm):
    build = built(dtype)
    model = filled(nn.ModuleDict({"one": norm(build, 64, 1e-5), "odd": norm(build, 45, 1e-5)}))
    x, stream = torch.randn(7, 64).to(dtype), torch.randn(7, 64)
    odd = torch.randn(7, 45).to(dtype)
    plain = [model["one"](x), model["one"](stream), model["one"](x, stream)]
    plain += [model["one"](x, x.clone()), model["one"](x.double()), model["odd"](odd)]

    assert use_native_layers(model, dtype, 1) is not None

    assert type(model["one"]) is NativeLayerNorm
    kept = stream.clone()
    native = [model["one"](x), model["one"](stream), model["one"](x, kept)]
    native += [model["one"](x, x.clone()), model["one"](x.double()), model["odd"](odd)]
    for found, expected in zip(native, plain, strict=True):
        near(found[0], expected[0], dtype)
        assert torch.equal(found[1].float(), expected[1].float())
    assert torch.equal(kept, stream + x.float()), "the residual takes the sum"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTISE)
@pytest.mark.parametrize("width", [64, 96, 37])
def test_a_table_that_a_head_shares_is_packed_once(dtype, kind, width):
    if kind == "int4" and width % 32:
        pytest.skip("no such groups")
    build = built(dtype)
    embed, head = Embedding(build, 50, width, 3.0), ColumnParallel(build, width, (50,))
    head.weight = embed.weight
    model = filled(
        nn.ModuleDict({"embed": embed, "head": head, "own": Embedding(build, 50, width)})
    )
    if kind != "plain":
        weight = QUANTISE[kind](embed.weight.detach().clone())
        for module in (embed, head):
            del module.weight
            module.weight = weight
    ids = torch.tensor([0, 49, 7, 7])
    expected, own = embed(ids), model["own"](ids)

    assert use_native_layers(model, dtype, 1) is not None

    assert type(model["embed"]) is NativeTable
    assert torch.equal(model["embed"](ids), expected)
    assert type(model["own"]) is Embedding
    assert torch.equal(model["own"](ids), own)


def test_weights_that_others_read_are_left():
    shape = LatentShape(num_heads=2, nope=16, rope_dim=8, value=16, latent=32)
    layer = AttentionLayer(index=0, num_heads=2, num_kv_heads=1, head_dim=40, scale=1.0)
    model = filled(
        nn.ModuleDict(
            {"one": LatentAttention(built(torch.float32), 64, Share(2, 0, 2), shape, layer, 24)}
        )
    )

    assert use_native_layers(model, torch.float32, 1) is not None

    assert isinstance(model["one"].kv_b_proj, Linear)
    assert not model["one"].kv_b_proj.weight.is_meta
    assert type(model["one"].kv_a_layernorm) is RMSNorm
    assert type(model["one"].q_b_proj) is NativeLayerLinear


def test_deferred_weights_are_read_once_by_whoever_takes_them():
    read: list[str] = []

    def deferred(name: str, *shape: int) -> DeferredWeight:
        def contents() -> torch.Tensor:
            read.append(name)
            return torch.ones(shape)

        return DeferredWeight(torch.Size(shape), contents, name)

    build = built(torch.float32)
    model = nn.ModuleDict({"packed": Linear(build, 64, (32,), bias=False)})
    model["first"], model["second"] = (Embedding(build, 9, 64) for _ in range(2))
    shared = deferred("table", 9, 64)
    for name, weight in (("packed", deferred("w", 32, 64)), ("first", shared), ("second", shared)):
        del model[name].weight
        model[name].weight = weight

    assert use_native_layers(model, torch.float32, 1) is not None
    assert read == ["w"]
    load_deferred(model)

    assert read == ["w", "table"]
    assert model["first"].weight is model["second"].weight
    assert set(dict(model.named_parameters())) == {"first.weight"}
    assert torch.equal(model["packed"](torch.ones(1, 64)), torch.full((1, 32), 64.0))


def test_other_dtypes_and_models_without_such_layers_are_left_alone():
    model = filled(nn.Sequential(Linear(built(torch.float16), 64, (32,), bias=False)))

    assert use_native_layers(model, torch.float16, 1) is None
    assert type(model[0]) is Linear
    assert use_native_layers(nn.Sequential(nn.Linear(3, 4)), torch.float32, 1) is None
