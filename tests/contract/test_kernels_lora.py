"""Adapters of rows: the native ops against the reference, and bits that depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.adapters import Factors, LoraLayer, LoraRows, LoraShape
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import Library, load
from tests.support.native import DTYPES, MAX_ROWS, NativeOp, assert_close, random, variants

RANKS = (1, 3, 8, 16, 17, 33)  # of slots; the last one is empty
MAX_RANK = 40
SIZES = {
    "one part": (96, (64,)),
    "queries, keys and values": (64, (128, 32, 32)),
    "odd": (50, (21, 700, 5)),
    "wide": (700, (1100, 1100)),
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


class Case:
    """A layer with adapters in slots, natively and by the reference."""

    def __init__(self, library: Library, dtype: torch.dtype, y_dtype: torch.dtype, size: str):
        self.dtype, self.y_dtype = dtype, y_dtype
        self.inputs, self.outputs = SIZES[size]
        self.rows = LoraRows(len(RANKS) + 1, MAX_ROWS, MAX_RANK)
        self.mine, self.theirs = (
            LoraLayer(self.rows, LoraShape(self.inputs, self.outputs), dtype, torch.device("cpu"))
            for _ in range(2)
        )
        like = self.x(1), self.y(1)
        self.op = NativeOp(library, dtype, lambda t, x, y: ops.lora(x, y, self.mine), like)
        for slot, rank in enumerate(RANKS):
            for layer in (self.mine, self.theirs):
                parts = [
                    None if (slot + number) % 3 == 2 else layer.prepare(self._factors(rank, number))
                    for number in range(len(self.outputs))
                ]
                layer.load(slot, parts)

    def _factors(self, rank: int, number: int) -> Factors:
        down = random(rank, self.inputs, dtype=torch.float32, seed=rank, scale=0.2)
        up = random(self.outputs[number], rank, dtype=torch.float32, seed=number, scale=0.5)
        return Factors(down, up, 1.7)

    def x(self, count: int) -> torch.Tensor:
        return random(MAX_ROWS, self.inputs, dtype=self.dtype)[:count]

    def y(self, count: int) -> torch.Tensor:
        return random(MAX_ROWS, sum(self.outputs), dtype=self.y_dtype, seed=1)[:count]

    def run(self, x: torch.Tensor, y: torch.Tensor, spans: list[tuple[int, int, int]]):
        self.rows.assign(spans)
        self.op.write(x, y)
        return self.op.run(StepRun(tokens=len(x)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_reference(library, dtype, y_dtype, size):
    if (dtype, y_dtype) == (torch.float32, torch.bfloat16):
        return  # no linear makes such rows
    case = Case(library, dtype, y_dtype, size)
    for spans in (
        [(3, 0, 1)],
        [(0, 2, 5), (5, 5, 6), (4, 9, 300), (2, 300, 301), (0, 310, 311), (6, 320, 330)],
        [(1, 0, 200)],
    ):
        count = max(stop for _, _, stop in spans) + 3
        x, y = case.x(count), case.y(count)

        found = case.run(x, y, spans)

        want = ops.lora(x, y.clone(), case.theirs)
        assert_close(found, want, dtype)  # A x is rounded to it
        others = torch.ones(count, dtype=torch.bool)
        for slot, start, stop in spans:
            others[start:stop] = slot == len(RANKS)
        assert torch.equal(found[others], y[others])
        assert not torch.equal(found, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_depend_on_no_other_row(library, dtype):
    case = Case(library, dtype, dtype, "queries, keys and values")
    x, y = case.x(150), case.y(150)
    whole = case.run(x, y, [(3, 0, 70), (4, 70, 140), (3, 140, 150)])

    for row, slot in ((0, 3), (69, 3), (70, 4), (101, 4), (149, 3)):
        alone = case.run(x[row : row + 1], y[row : row + 1], [(slot, 0, 1)])
        assert torch.equal(alone[0], whole[row])
    library.dll.sylvan_threads(1)
    again = case.run(x, y, [(4, 70, 140), (3, 140, 150), (3, 0, 70)])
    assert torch.equal(again, whole)
    parts = [case.run(x[a:b], y[a:b], [(3, 0, b - a)]) for a, b in ((0, 33), (33, 70))]
    assert torch.equal(torch.cat(parts), whole[:70])


def layers(rows: LoraRows, dtype: torch.dtype, inputs: int, outputs: int, kind: str):
    """Two of a kind, for kernels and for the reference."""
    shape = LoraShape(inputs, (outputs,), kind)
    return [LoraLayer(rows, shape, dtype, torch.device("cpu")) for _ in range(2)]


def fill(made: list[LoraLayer]) -> None:
    """Adapters in all slots but the last."""
    for slot, rank in enumerate(RANKS):
        down = random(rank, made[0].inputs, dtype=torch.float32, seed=rank, scale=0.2)
        up = random(made[0].outputs[0], rank, dtype=torch.float32, seed=7 * rank, scale=0.5)
        for layer in made:
            layer.load(slot, [layer.prepare(Factors(down, up, 1.7))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_finds_the_adapter_of_each_row_that_it_takes(library, dtype):
    rows = LoraRows(len(RANKS) + 1, MAX_ROWS, MAX_RANK)
    mine, theirs = layers(rows, dtype, 70, 1100, "head")
    x, y = random(MAX_ROWS, 70, dtype=dtype), random(MAX_ROWS, 1100, dtype=torch.float32, seed=1)

    def head(tracer, x, y):
        taken, logits = (ops.take_rows(v, tracer.sample_rows) for v in (x, y))
        return ops.lora(taken, logits, mine)

    op = NativeOp(library, dtype, head, (x[:1], y[:1]))
    fill([mine, theirs])
    rows.assign([(0, 2, 5), (3, 7, 70), (len(RANKS), 70, 72), (5, 72, 73)])
    op.write(x, y)

    for wanted in ([4], [0, 2, 3, 69, 70, 72, 73, 7], list(range(90))):
        numbers = np.array(wanted, np.int32)
        step = StepRun(tokens=100, outputs=len(wanted), out_rows=numbers.ctypes.data)

        found = op.run(step)

        rows.take(numbers)
        assert_close(found, ops.lora(x[wanted], y[wanted].clone(), theirs), dtype)
        same = [
            i for i, row in enumerate(wanted) if not (2 <= row < 5 or 7 <= row < 70 or row == 72)
        ]
        assert torch.equal(found[same], y[[wanted[i] for i in same]])
        for i, row in enumerate(wanted):
            alone = np.array([row], np.int32)
            again = op.run(StepRun(tokens=100, outputs=1, out_rows=alone.ctypes.data))
            assert torch.equal(again[0], found[i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_looks_up_the_adapter_of_each_row(library, dtype):
    rows = LoraRows(len(RANKS) + 1, MAX_ROWS, MAX_RANK)
    mine, theirs = layers(rows, dtype, 50, 70, "embedding")
    y = random(MAX_ROWS, 70, dtype=torch.float32, seed=1)
    op = NativeOp(library, dtype, lambda t, y: ops.lora_embedding(t.input_ids, y, mine), (y[:1],))
    fill([mine, theirs])
    ids = np.random.default_rng(3).integers(0, 50, 200).astype(np.int32)
    rows.assign([(0, 2, 5), (3, 7, 170), (len(RANKS), 170, 172), (5, 172, 173)])
    op.write(y)

    found = op.run(StepRun(tokens=200, ids=ids.ctypes.data))

    want = ops.lora_embedding(torch.from_numpy(ids), y[:200].clone(), theirs)
    assert_close(found, want, dtype)
    none = [0, 1, 5, 6, 170, 171, 173, 199]
    assert torch.equal(found[none], y[none])
    assert not torch.equal(found, y[:200])


def test_a_step_without_adapters_changes_nothing(library):
    case = Case(library, torch.bfloat16, torch.bfloat16, "one part")
    x, y = case.x(20), case.y(20)
    assert not torch.equal(case.run(x, y, [(3, 0, 20)]), y)

    assert torch.equal(case.run(x, y, []), y)


def test_a_slot_can_be_emptied_and_filled_again(library):
    case = Case(library, torch.bfloat16, torch.bfloat16, "one part")
    x, y = case.x(4), case.y(4)
    before = case.run(x, y, [(3, 0, 4)])
    case.mine.unload(3)
    assert torch.equal(case.run(x, y, [(3, 0, 4)]), y)

    case.mine.load(3, [case.mine.prepare(case._factors(RANKS[3], 0))])

    assert torch.equal(case.run(x, y, [(3, 0, 4)]), before)
