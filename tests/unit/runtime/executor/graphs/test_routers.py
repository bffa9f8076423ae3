"""Routers whose product is native: the same choices as before, whatever rows are beside."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.runtime.executor.graphs.routers import NativeRouter, use_native_routers

try:
    LIBRARY = load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

DIM, EXPERTS = 200, 48


class Block(nn.Module):
    """A router, and what stands for experts."""

    def __init__(self, router: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = router.to(dtype), nn.Identity()
        for parameter in router.parameters():
            nn.init.normal_(parameter, std=DIM**-0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.gate(x)


def qwen() -> nn.Module:
    return Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=DIM, num_experts=EXPERTS, num_experts_per_tok=4)
    )


def deepseek() -> nn.Module:
    config = DeepseekV3Config(
        hidden_size=DIM,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
    )
    return DeepseekV3TopkRouter(config)


class OwnRoute(nn.Module):
    """Does something else with its weight than multiply rows by it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.empty(EXPERTS, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "scaled":
            return F.linear(x, self.weight * 2)
        if self.kind == "mixes rows":
            return F.linear(x, self.weight) - x.mean()
        if self.kind == "twice":
            return F.linear(x, self.weight) + F.linear(x, self.weight)
        return x @ self.weight.T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", [qwen, deepseek])
def test_choices_are_sticky_and_independent(router, dtype):
    block = Block(router(), dtype)
    x = torch.randn(90, DIM).to(dtype)
    with torch.inference_mode():
        logits, shares, ids = block(x)
        use_native_routers(block, LIBRARY, dtype, ["experts"])
        assert type(block.gate) is NativeRouter
        found = block(x)
        alone = [
            torch.cat(parts) for parts in zip(*(block(row) for row in x.split(1)), strict=True)
        ]
    assert all(map(torch.equal, found, alone))
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found[0], logits, rtol=bound, atol=bound)
    assert found[1].dtype == shares.dtype
    assert (found[2].sort(1)[0] == ids.sort(1)[0]).all(1).float().mean() > 0.9


def test_a_router_still_answers_for_itself():
    block = Block(qwen(), torch.float32)
    weight = block.gate.weight
    use_native_routers(block, LIBRARY, torch.float32, ["experts"])
    assert block.gate.weight is weight
    assert block.gate.top_k == 4
    with pytest.raises(AttributeError, match="nothing"):
        _ = block.gate.nothing


@pytest.mark.parametrize("kind", ["scaled", "mixes rows", "twice", "by hand"])
def test_what_does_something_else_is_left_alone(kind):
    block = Block(OwnRoute(kind), torch.float32)
    use_native_routers(block, LIBRARY, torch.float32, ["experts"])
    assert type(block.gate) is OwnRoute
