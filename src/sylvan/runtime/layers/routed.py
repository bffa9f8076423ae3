"""Base of modules that route rows to matrices other than whole MLPs (JetMoE, LongCat)."""

from __future__ import annotations

from torch import nn

from sylvan.kernels.experts.products import ExpertProduct, expert_product


class RoutedProjection(nn.Module):
    """Multiplies each row by the matrices its router selects, with `product`.

    The executor may replace `product` by a kernel of its device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.product: ExpertProduct = expert_product
