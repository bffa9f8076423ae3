"""State of a mixture of experts besides its weights."""

from __future__ import annotations

import torch

from sylvan.kernels.experts import Routing
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.moe import MoE, MoEShape


def test_counts_of_experts_lie_where_the_weights_are():
    """A captured graph adds to them, so nothing may be moved on the way."""
    shape = MoEShape(
        dim=8, inner=4, num_experts=4, routing=Routing(top_k=2, normalise=True), act="silu"
    )

    made = MoE(Build(dtype=torch.float32, length=8, device=torch.device("meta")), shape)

    assert made.load.device == made.experts.gate_up_proj.device == torch.device("meta")
