"""Modules that multiply rows by matrices that a router chose, and are no mixtures of MLPs."""

from __future__ import annotations

from torch import nn

from sylvan.kernels.experts.products import ExpertProduct, expert_product


class RoutedProjection(nn.Module):
    """Multiplies rows by chosen matrices; whoever runs the module may set `product`."""

    def __init__(self) -> None:
        super().__init__()
        self.product: ExpertProduct = expert_product
