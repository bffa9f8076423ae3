"""Native matrix products in a model that is not ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.runtime.executor.graphs.linears import NativeLinear, use_native_linears

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
    ids = torch.randint(0, 77, (3, 401))  # more rows than one call takes
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


def test_pytorchs_copies_are_let_go_but_for_a_shared_one() -> None:
    model = Foreign(torch.float32)
    assert use_native_linears(model, torch.float32, threads=1) is not None
    assert model.blocks[0].weight.is_meta
    assert model.head.weight.is_meta
    assert not model.embed.weight.is_meta


def test_other_dtypes_and_models_without_linears_are_left_alone() -> None:
    model = Foreign(torch.float16)
    assert use_native_linears(model, torch.float16, threads=1) is None
    assert type(model.head) is nn.Linear
    assert use_native_linears(nn.Embedding(3, 4), torch.float32, threads=1) is None
