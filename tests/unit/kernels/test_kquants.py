"""K-quants against gguf's own reading of them."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.matmul.kquants import KINDS, rounded_blocks
from sylvan.runtime.models.formats.gguf import KEPT

gguf = pytest.importorskip("gguf")

LOSS = {"Q2_K": 0.34, "Q3_K": 0.18, "Q4_K": 0.085, "Q5_K": 0.045, "Q6_K": 0.025}
"""Root mean square error of normal numbers, whose own is 1."""


def normal(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


def read(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_come_back(kind: str) -> None:
    x = normal(6, 512)
    x[1] *= 1e-2
    x[2] += 3.0
    x[3, :256] = 0.0
    x[4] = 0.0

    blocks = rounded_blocks(x, kind)

    found = read(blocks, kind)
    size, make = KEPT[kind]
    assert torch.equal(make(blocks.unflatten(1, (-1, size))).numbers(), found)
    for row in (0, 1, 3, 5):
        part = slice(256, None) if row == 3 else slice(None)
        loss = (found[row, part] - x[row, part]).square().mean().sqrt() / x[row, part].std()
        assert loss < LOSS[kind], row
    assert found[4].eq(0).all()
    assert found[3, :256].eq(0).all()


def test_more_bits_lose_less() -> None:
    x = normal(16, 1024)
    losses = [(read(rounded_blocks(x, kind), kind) - x).square().mean() for kind in KINDS]
    plain = torch.from_numpy(
        gguf.quants.dequantize(
            gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q4_0),
            gguf.GGMLQuantizationType.Q4_0,
        )
    )

    assert losses == sorted(losses, reverse=True)
    assert losses[2] < 0.8 * (plain - x).square().mean()


def test_large_numbers_do_not_overflow() -> None:
    x = normal(2, 256) * 1e6

    for kind in KINDS:
        assert read(rounded_blocks(x, kind), kind).isfinite().all()
