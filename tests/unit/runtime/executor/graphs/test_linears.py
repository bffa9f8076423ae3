"""Native matrix products in a model that is not ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen3MoeConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.runtime.executor.graphs.linears import use_native_linears
from sylvan.runtime.executor.graphs.native_modules import (
    MAX_ROWS,
    NativeEmbedding,
    NativeExperts,
    NativeLinear,
    NativeNorm,
    NativeRowsModule,
)

try:
    load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


class Foreign(nn.Module):
    """Sizes that are no multiples of anything, a bias, a tied head, and a router in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(77, 45, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(45, 45, bias=i == 0, dtype=dtype) for i in range(2))
        self.router = nn.Linear(45, 3, dtype=torch.float32)
        self.head = nn.Linear(45, 77, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x), self.router(x.float())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_they_give_what_pytorch_gives(dtype: torch.dtype, bound: float) -> None:
    model = Foreign(dtype)
    ids = torch.randint(0, 77, (3, MAX_ROWS // 2))  # more rows than one call takes
    with torch.inference_mode():
        logits, routes = model(ids)
        assert use_native_linears(model, dtype, threads=2) is not None
        mine, routed = model(ids)
    kept = {name for name, module in model.named_modules() if isinstance(module, NativeLinear)}
    assert kept == {"blocks.0", "blocks.1", "head"} | ({"router"} if dtype.itemsize == 4 else set())
    assert mine.shape == logits.shape
    assert mine.dtype == logits.dtype
    assert (mine - logits).float().norm() <= bound * logits.float().norm()
    assert (routed - routes).norm() <= bound * routes.norm()


def test_rows_do_not_depend_on_each_other() -> None:
    model = Foreign(torch.bfloat16)
    assert use_native_linears(model, torch.bfloat16, threads=2) is not None
    ids = torch.randint(0, 77, (40,))
    with torch.inference_mode():
        whole, _ = model(ids)
        alone = torch.cat([model(ids[i : i + 1])[0] for i in range(len(ids))])
    assert torch.equal(whole, alone)


def test_pytorchs_copies_are_let_go_and_a_shared_one_is_packed_once() -> None:
    model = Foreign(torch.float32)
    assert use_native_linears(model, torch.float32, threads=1) is not None
    assert isinstance(model.embed, NativeEmbedding)
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    assert {tuple(parameter.shape) for parameter in held} == {(0,)}
    assert held[0] is next(model.parameters()), "the model finds its device there"


class Scaled(nn.Embedding):
    """As many models have it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3.0


class Counting(nn.Embedding):
    """Goes by the ids themselves, so that it needs the whole table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + ids[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_embedding_does_besides_looking_up_stays(dtype: torch.dtype) -> None:
    model = Foreign(dtype)
    model.embed = Scaled(77, 45, padding_idx=70, dtype=dtype)
    model.head.weight = model.embed.weight
    ids = torch.tensor([[0, 76, 70], [5, 5, 1]])
    with torch.inference_mode():
        expected = model.embed(ids)
        assert use_native_linears(model, dtype, threads=1) is not None
        assert torch.equal(model.embed(ids), expected)
    assert isinstance(model.embed, NativeEmbedding)


def test_an_embedding_that_needs_its_table_keeps_it_with_its_head() -> None:
    model = Foreign(torch.float32)
    model.embed = Counting(77, 45)
    model.head.weight = model.embed.weight
    assert use_native_linears(model, torch.float32, threads=1) is not None
    assert type(model.embed) is Counting
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embed.weight
    assert not model.head.weight.is_meta


def test_a_module_of_two_names_and_a_weight_of_two_modules_are_packed_once() -> None:
    model = Foreign(torch.float32)
    model.blocks[1] = model.blocks[0]
    model.second = nn.Linear(45, 77, bias=False)
    model.second.weight = model.head.weight
    ids = torch.randint(0, 77, (9,))
    with torch.inference_mode():
        expected, _ = model(ids)
        assert use_native_linears(model, torch.float32, threads=1) is not None
        found, _ = model(ids)
        assert torch.equal(model.second(torch.ones(1, 45)), model.head(torch.ones(1, 45)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert model.blocks[0] is model.blocks[1]


@pytest.mark.parametrize("rows", [1, 5, 16, 48, MAX_ROWS + 88, 2 * MAX_ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_where_they_lie_or_copied(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 96, dtype=dtype))
    wide = torch.randn(rows, 128).to(dtype)
    with torch.inference_mode():
        expected = [model(wide[:, :64]), model(wide[:, :64].contiguous())]
        assert use_native_linears(model, dtype, threads=2) is not None
        strided, whole = model(wide[:, :64]), model(wide[:, :64].contiguous())
    assert torch.equal(strided, whole)
    torch.testing.assert_close(whole, expected[1], rtol=2e-2, atol=2e-2)
    assert whole.is_contiguous()


def test_other_dtypes_and_models_without_linears_are_left_alone() -> None:
    model = Foreign(torch.float16)
    assert use_native_linears(model, torch.float16, threads=1) is None
    assert type(model.head) is nn.Linear
    assert use_native_linears(nn.Embedding(3, 4), torch.float32, threads=1) is None


class Gated(nn.Module):
    """A gated product with biases, behind a norm."""

    def __init__(self, dtype: torch.dtype, act: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        config = LlamaConfig(hidden_size=96, intermediate_size=80, hidden_act=act, mlp_bias=True)
        self.norm = LlamaRMSNorm(96).to(dtype)
        self.mlp = LlamaMLP(config).to(dtype)
        for parameter in self.parameters():
            parameter.data += torch.rand_like(parameter) * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_norms_and_gated_products_are_replaced_as_a_whole(
    dtype: torch.dtype, bound: float, act: str
) -> None:
    model = Gated(dtype, act)
    x = torch.randn(2, MAX_ROWS - 9, 96).to(
        dtype
    )  # in pieces, because rows are kept between the ops
    with torch.inference_mode():
        expected = model(x)
        assert use_native_linears(model, dtype, threads=2) is not None
        found = model(x)
        alone = torch.cat([model(x[:1, i : i + 1]) for i in range(20)], 1)
    assert type(model.mlp) is NativeRowsModule
    assert not list(model.mlp.children())
    assert (found - expected).float().norm() <= bound * expected.float().norm()
    assert torch.equal(found[:1, :20], alone)


class Plain(nn.Module):
    """A layer norm, an MLP without a gate and one whose gate is stored with what it opens."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.norm = nn.LayerNorm(64)
        self.first = GPTNeoXMLP(GPTNeoXConfig(hidden_size=64, intermediate_size=72))
        self.second = Phi3MLP(Phi3Config(hidden_size=64, intermediate_size=80))
        for parameter in self.parameters():
            parameter.data += torch.rand_like(parameter) * 0.1
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.norm(x))
        return x + self.second(self.norm(x))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_layer_norms_and_other_mlps_are_replaced_too(dtype: torch.dtype, bound: float) -> None:
    model, x = Plain(dtype), torch.randn(1, 70, 64).to(dtype)
    with torch.inference_mode():
        expected = model(x)
        assert use_native_linears(model, dtype, threads=2) is not None
        found = model(x)
        alone = torch.cat([model(x[:, i : i + 1]) for i in range(9)], 1)
    kinds = type(model.norm), type(model.first), type(model.second)
    assert kinds == (NativeNorm, NativeRowsModule, NativeRowsModule)
    assert (found - expected).float().norm() <= bound * expected.float().norm()
    assert torch.equal(found[:, :9], alone)


class Tied(nn.Module):
    """A head within a module that could be replaced, with the weight of an embedding outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(50, 32)
        self.head = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=50))
        self.head.up_proj.weight = self.embed.weight
        self.parts = nn.Sequential(nn.Linear(32, 32), nn.SiLU())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.parts[1](self.parts[0](self.embed(ids))))


def test_parts_that_something_else_uses_are_replaced_alone() -> None:
    model, ids = Tied(), torch.arange(50)
    with torch.inference_mode():
        expected = model(ids)
        assert use_native_linears(model, torch.float32, threads=1) is not None
        found = model(ids)
    assert type(model.head) is LlamaMLP
    assert type(model.head.up_proj) is NativeLinear
    assert type(model.parts[0]) is NativeLinear
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_norm_takes_other_types_and_answers_for_what_it_stands_for() -> None:
    model = Gated(torch.bfloat16, "silu")
    assert use_native_linears(model, torch.bfloat16, threads=1) is not None
    x = torch.randn(3, 96)
    with torch.inference_mode():
        assert model.norm(x).dtype is torch.float32
    assert model.norm.variance_epsilon == 1e-6
    assert model.mlp.down_proj.weight.dtype is torch.bfloat16
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.mlp.nothing


class Visited(nn.Module):
    """Experts by whatever names, and columns that are no multiple of anything."""

    def __init__(self, dtype: torch.dtype, dim: int = 45) -> None:
        super().__init__()
        torch.manual_seed(4)
        config = Qwen3MoeConfig(hidden_size=dim, moe_intermediate_size=40, num_experts=7)
        config._experts_implementation = "eager"
        self.experts = Qwen3MoeExperts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.to(dtype)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return self.experts(x, top_k_weights=shares, top_k_index=ids)


def visits(rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(rows, 7, generator=generator).argsort(1)[:, :3]
    x = torch.randn(rows, dim, generator=generator).to(dtype)
    return x, ids, torch.rand(rows, 3, generator=generator).to(dtype)


@pytest.mark.parametrize("dim", [45, 64])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_experts_are_replaced_and_rows_do_not_depend_on_each_other(
    dtype: torch.dtype, bound: float, dim: int
) -> None:
    model, given = Visited(dtype, dim), visits(2 * MAX_ROWS + 9, dim, dtype)
    with torch.inference_mode():
        expected = model(*given)
        assert use_native_linears(model, dtype, 2, {"experts": 3}) is not None
        found = model(*given)
        few = [*range(5), MAX_ROWS - 1, MAX_ROWS, 2 * MAX_ROWS + 8]
        alone = torch.cat([model(*(part[i : i + 1] for part in given)) for i in few])
    assert type(model.experts) is NativeExperts
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert (found - expected).float().norm() <= bound * expected.float().norm()
    assert torch.equal(found[few], alone)
    assert not list(model.parameters()), "PyTorch's copies are let go"
    assert model.experts.gate_up_proj.is_meta


def test_a_choice_that_is_no_experts_number_never_reaches_the_kernels() -> None:
    model = Visited(torch.float32)
    assert use_native_linears(model, torch.float32, 1, {"experts": 3}) is not None
    x, ids, shares = visits(2, 45, torch.float32)
    for wrong in (7, -1):
        ids[1, 2] = wrong
        with pytest.raises(IndexError, match=r"expert ids must be in 0\.\.6"):
            model(x, ids, shares)
    with pytest.raises(IndexError, match="expert ids of shape"):
        model(x, ids[:, :2], shares[:, :2])


def test_experts_with_an_unknown_top_k_stay() -> None:
    model = Visited(torch.float32)
    model.other = nn.Linear(3, 3)
    assert use_native_linears(model, torch.float32, 1) is not None
    assert type(model.experts) is Qwen3MoeExperts
