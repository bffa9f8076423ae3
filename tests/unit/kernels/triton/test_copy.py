"""Copies of pages against the reference; few programs in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels.copy import reference
from sylvan.kernels.copy.triton_copy import copy_pages, gather_pages, scatter_pages
from tests.support.chosen import on_gpu
from tests.support.tensors import home, put

SHAPES = {
    "words of 8 bytes": (3, 6, 9000),
    "of 4": (2, 6, 260),
    "of 2": (2, 6, 70),
    "odd": (1, 6, 33),
}
EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def memory_of(shape: tuple[int, int, int], *, page_first: bool = False) -> torch.Tensor:
    regions, pages, width = shape
    size = (pages, regions, width) if page_first else shape
    numbers = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    memory = put(torch.from_numpy(numbers))
    return memory.transpose(0, 1) if page_first else memory


def host(pages: int, shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.zeros(pages, shape[0], shape[2], dtype=torch.uint8, pin_memory=on_gpu())


@EACH
@pytest.mark.parametrize("page_first", [False, True])
def test_pages_go_to_the_host_and_come_back(shape: tuple[int, int, int], page_first: bool) -> None:
    memory, pages = memory_of(shape, page_first=page_first), torch.tensor([4, 0, 5])
    got, want = host(3, shape), host(3, shape)

    gather_pages(memory, pages, got)
    reference.gather_pages(memory, pages, want)

    assert torch.equal(home(memory)[:, pages], got.transpose(0, 1))
    assert torch.equal(got, want)
    target, other = (torch.zeros_like(memory) for _ in range(2))
    scatter_pages(target, torch.tensor([1, 5, 2]), got)
    reference.scatter_pages(other, torch.tensor([1, 5, 2]), want)
    assert torch.equal(target, other)
    assert torch.equal(target[:, [1, 5, 2]], memory[:, [4, 0, 5]])


@EACH
def test_copies_are_done_in_their_order(shape: tuple[int, int, int]) -> None:
    memory, want = memory_of(shape), memory_of(shape)
    width = shape[2]
    copies = [(4, 1, width), (2, 4, width // 2), (1, 3, width // 3), (5, 1, 1), (0, 5, 0)]

    copy_pages(memory, copies)
    reference.copy_pages(want, copies)

    assert torch.equal(memory, want)
    assert not torch.equal(memory, memory_of(shape))
