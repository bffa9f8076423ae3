"""The definition of correct, in PyTorch; runs on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PageBytes = tuple[int, int, int]
"""(source page, target page, leading bytes of each region)."""


def gather_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, out_NRW: torch.Tensor) -> None:
    found_RNW = memory_RPW[:, pages_N.to(memory_RPW.device, non_blocking=True)]
    out_NRW.copy_(found_RNW.transpose(0, 1), non_blocking=True)


def scatter_pages(memory_RPW: torch.Tensor, pages_N: torch.Tensor, data_NRW: torch.Tensor) -> None:
    pages, data = (x.to(memory_RPW.device, non_blocking=True) for x in (pages_N, data_NRW))
    memory_RPW[:, pages] = data.transpose(0, 1)


def copy_pages(memory_RPW: torch.Tensor, copies: Sequence[PageBytes]) -> None:
    for source, target, num_bytes in copies:
        memory_RPW[:, target, :num_bytes] = memory_RPW[:, source, :num_bytes]
