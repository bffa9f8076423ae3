"""Grouped low-rank products against their reference."""

from __future__ import annotations

import pytest
import torch

from sylvan.kernels.adapters import Factors, LoraLayer, LoraRows, LoraShape
from sylvan.kernels.lora import reference
from sylvan.kernels.lora.triton_lora import lora
from tests.support.tensors import DTYPES, home, put, random, tolerance

RANKS = (1, 16, 33)  # of slots; the last slot is empty
SIZES = {"one part": (96, (64,)), "joined": (64, (128, 32, 32)), "odd": (50, (21, 130, 5))}


def layers(dtype: torch.dtype, size: str) -> tuple[LoraRows, LoraLayer, LoraLayer]:
    """Two of the same, on the chosen device and on the CPU."""
    inputs, outputs = SIZES[size]
    rows = LoraRows(len(RANKS) + 1, 256, 40)
    there = put(torch.zeros(1)).device
    mine, theirs = (
        LoraLayer(rows, LoraShape(inputs, outputs), dtype, device)
        for device in (there, torch.device("cpu"))
    )
    for slot, rank in enumerate(RANKS):
        for layer in (mine, theirs):
            parts = [
                None
                if (slot + number) % 3 == 2
                else layer.prepare(
                    Factors(
                        home(random(rank, inputs, seed=rank)) / 8,
                        home(random(count, rank, seed=number)) / 4,
                        -1.7,
                    )
                )
                for number, count in enumerate(outputs)
            ]
            layer.load(slot, parts)
    return rows, mine, theirs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("y_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_reference(dtype: torch.dtype, y_dtype: torch.dtype, size: str) -> None:
    rows, mine, theirs = layers(dtype, size)
    inputs, outputs = SIZES[size]
    for spans in ([(1, 0, 1)], [(0, 2, 5), (2, 5, 6), (1, 9, 40), (3, 41, 44)]):
        rows.assign(spans)
        x, y = random(64, inputs, dtype=dtype), random(64, sum(outputs), dtype=y_dtype, seed=1)

        got = lora(x, y.clone(), mine)

        want = reference.lora(home(x), home(y).clone(), theirs)
        limit = max(tolerance(dtype, 1e-4, 5e-3), tolerance(y_dtype, 1e-4, 5e-3))
        torch.testing.assert_close(home(got), want, rtol=limit, atol=limit)
        used = torch.zeros(64, dtype=torch.bool)
        for slot, start, stop in spans:
            used[start:stop] = slot < len(RANKS)
        assert torch.equal(home(got)[~used], home(y)[~used])
        assert not torch.equal(home(got), home(y))


def test_a_row_does_not_depend_on_the_others() -> None:
    rows, mine, _ = layers(torch.float32, "joined")
    x, y = random(64, 64), random(64, 192, seed=1)
    rows.assign([(2, 0, 20), (1, 20, 50), (2, 50, 64)])
    together = lora(x, y.clone(), mine)

    for row, slot in ((3, 2), (33, 1), (63, 2)):
        rows.assign([(slot, 0, 1)])
        alone = lora(x[row : row + 1], y[row : row + 1].clone(), mine)
        assert torch.equal(alone[0], together[row])


def test_slots_change_hands_and_steps_may_have_no_adapter() -> None:
    rows, mine, _ = layers(torch.float32, "one part")
    x, y = random(4, 96), random(4, 64, seed=1)
    rows.assign([(1, 0, 4)])
    before = lora(x, y.clone(), mine)

    mine.unload(1)
    assert torch.equal(lora(x, y.clone(), mine), y)
    down, up = home(random(16, 96, seed=16)) / 8, home(random(64, 16, seed=0)) / 4
    mine.load(1, [mine.prepare(Factors(down, up, -1.7))])
    assert torch.equal(lora(x, y.clone(), mine), before)
    rows.assign([])
    assert torch.equal(lora(x, y.clone(), mine), y)
