"""A head keeps the largest logit of rows that want no other: the token is that of whole rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, Value
from sylvan.kernels.matmul.weights import quantise_int4, quantise_int8
from sylvan.kernels.native.binding import Run
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.sampling.api import SampleOutput
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.native import NativeRows, NativeSampler
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots
from tests.support.native import DTYPES, random, variants

WIDTH, VOCAB, MOST = 128, 1007, 130
UNTOUCHED = 7.0
WEIGHTS = {"dense": lambda w: w, "int8": quantise_int8, "int4": lambda w: quantise_int4(w, 64)}
WISHES = {
    "greedy": {},
    "drawn": {"temperature": 0.9},
    "of the best": {"temperature": 0.9, "top_k": 9, "top_p": 0.8},
    "penalty": {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
    "bias": {"logit_bias": {"11": 60.0}},
    "stops": {"min_new_tokens": 99, "stop_token_ids": tuple(range(0, VOCAB, 2))},
    "stops, later": {"min_new_tokens": 1, "stop_token_ids": tuple(range(0, VOCAB, 2))},
}


@pytest.fixture(params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    return load(request.param)


class Head:
    """A product over the rows to sample, the last op of its program."""

    def __init__(
        self,
        library: Library,
        weight: LinearWeight,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        cap: float | None = None,
    ) -> None:
        self.vocab = weight.shape[0]
        limits = RecorderLimits(max_tokens=1, max_outputs=MOST)
        recorder = NativeRecorder(dtype, limits, {}, library.constants)
        self.x = recorder.input(WIDTH, "bf16" if dtype == torch.bfloat16 else "f32", "outputs")
        self.logits: Value = ops.linear(self.x, weight, bias, out_f32=True)
        if cap is not None:
            self.logits = ops.softcap(self.logits, cap)
        recorder.pin(self.logits)
        self.program = Program(library, place(recorder.draft))
        self.library = library

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of all rows."""
        self.program.write(self.x, x)
        self.program.run(Run(outputs=len(x)))
        return self.program.read(self.logits, len(x)).clone()

    def sample(
        self, x: torch.Tensor, batch: SamplingBatch, masks: Masks | None = None
    ) -> tuple[SampleOutput, torch.Tensor]:
        """What one call chooses, and the memory of the logits after it."""
        self.program.write(self.x, x)
        memory = self.program.read(self.logits, len(x))
        memory.fill_(UNTOUCHED)
        rows = NativeRows(batch.params, len(x))
        rows.call.read(memory.data_ptr(), memory.stride(0))
        rows.call.slots[:], rows.call.positions[:] = batch.slots, batch.positions
        rows.call.struct.rows = len(x)
        rows.ready(batch.slots)
        rows.mask(masks)
        run = Run(outputs=len(x), sample=ctypes.addressof(rows.call.struct))
        return rows.output(batch.slots, self.program.run(run)), memory.clone()


def batch_of(
    wishes: list[dict[str, object]], vocab: int = VOCAB, told: IntArray | None = None
) -> SamplingBatch:
    """A row for each wish, four tokens of output behind it; `told` want log probabilities."""
    params = SamplingSlots(len(wishes), vocab)
    for slot, wish in enumerate(wishes):
        request = GenerateRequest(
            rid=str(slot),
            input_ids=np.arange(3, dtype=np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(**({"temperature": 0.0, "sampling_seed": slot} | wish)),
            logprobs=LogprobOptions(top=2) if told is not None and slot in told else None,
        )
        params.join(slot, request, np.array([5, 5, 6, 9], np.int32))
    slots = np.arange(len(wishes), dtype=np.int32)
    return SamplingBatch(slots, np.full(len(wishes), 7, np.int64), params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_first_of_the_largest_is_found_and_no_row_written(
    library: Library, dtype: torch.dtype, kind: str
) -> None:
    matrix = random(VOCAB, WIDTH, dtype=dtype)
    matrix[500:1000] = matrix[:500]  # so that every second row has a tie
    head = Head(library, WEIGHTS[kind](matrix), dtype)
    x = random(MOST, WIDTH, dtype=dtype, seed=1)
    library.dll.sylvan_threads(2)
    want = head.whole(x).numpy()
    assert ((want == want.max(1, keepdims=True)).sum(1) > 1).any()

    for threads in (1, 2, 3):
        library.dll.sylvan_threads(threads)
        for rows in (1, 2, 4, 5, 16, 17, 33, 65, MOST):
            found, memory = head.sample(x[:rows], batch_of([{}] * rows))
            assert found.token_ids.tolist() == want[:rows].argmax(1).tolist(), (threads, rows)
            assert not found.errors
            assert (memory == UNTOUCHED).all()


def test_what_is_no_number_never_wins_and_padding_neither(library: Library) -> None:
    vocab, inf = 37, float("inf")
    cases: list[tuple[dict[int, float], float, int | None]] = [
        ({}, -5.0, 0),
        ({36: -4.0}, -5.0, 36),
        ({3: float("nan"), 9: 1.0, 30: 1.0}, -1.0, 9),
        ({20: -3.0}, float("nan"), 20),
        ({20: -0.0, 31: 0.0}, -inf, 20),
        ({8: inf, 4: 3.0}, float("nan"), 8),
        ({}, -inf, None),
        ({}, float("nan"), None),
    ]
    for dtype in DTYPES:
        for special, others, want in cases:
            bias = torch.full((vocab,), others)
            bias[list(special)] = torch.tensor(list(special.values()))
            head = Head(library, torch.zeros(vocab, WIDTH, dtype=dtype), dtype, bias)
            x = torch.zeros(6, WIDTH, dtype=dtype)

            found, memory = head.sample(x, batch_of([{}] * 6, vocab))

            assert found.token_ids.tolist() == [want or 0] * 6, (special, others)
            assert len(found.errors) == (6 if want is None else 0)
            assert (memory == UNTOUCHED).all()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rows_that_want_more_are_whole_and_sampled_as_ever(library: Library, kind: str) -> None:
    head = Head(library, WEIGHTS[kind](random(VOCAB, WIDTH, dtype=torch.bfloat16)), torch.bfloat16)
    names = [*WISHES, "masked", "told"] * 3
    wishes = [WISHES.get(name, {}) for name in names]
    masked, told = (
        np.array([i for i, n in enumerate(names) if n == wanted], np.int32)
        for wanted in ("masked", "told")
    )
    bits = np.zeros((len(masked), -(-VOCAB // 32)), np.int32)
    bits[:, 3] = 0b10010
    masks = Masks(masked, bits)
    x = random(len(names), WIDTH, dtype=torch.bfloat16, seed=2)
    library.dll.sylvan_threads(2)
    batch = batch_of(wishes, told=told)
    want = NativeSampler(library).sample(head.whole(x), batch, masks)

    found, memory = head.sample(x, batch, masks)

    assert found.token_ids.tolist() == want.token_ids.tolist()
    assert {r: p.top_ids.tolist() for r, p in found.logprobs.items()} == {
        r: p.top_ids.tolist() for r, p in want.logprobs.items()
    }
    left = [name for name, row in zip(names, memory, strict=True) if (row == UNTOUCHED).all()]
    assert sorted(set(left)) == ["greedy", "stops, later"]


def test_logits_that_another_op_changes_are_whole(library: Library) -> None:
    head = Head(library, random(VOCAB, WIDTH, dtype=torch.float32), torch.float32, cap=0.5)
    x = random(3, WIDTH, dtype=torch.float32, seed=3, scale=9.0)
    want = head.whole(x).numpy()
    assert ((want == want.max(1, keepdims=True)).sum(1) > 1).all(), "the cap makes equals"

    found, memory = head.sample(x, batch_of([{}] * 3))

    assert found.token_ids.tolist() == want.argmax(1).tolist()
    assert (memory != UNTOUCHED).all()
