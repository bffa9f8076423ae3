"""Row statistics collected by the head's product: tokens equal those of whole rows, bit by bit."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, TracedTensor
from sylvan.kernels.matmul.weights import quantise_int4, quantise_int4_codes, quantise_int8
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.native_rows import NativeSamplingRows
from sylvan.runtime.sampling.output import SampleOutput
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots
from tests.support.native import DTYPES, random, variants

WIDTH, VOCAB, MOST = 128, 1007, 130
MANY = 40_007
"""A vocabulary so large that the k largest are kept; with a total, of as many rows as BATCH."""
BATCH = 60
UNTOUCHED = 7.0
NEVER_WRITTEN = {
    *("greedy", "of the best", "likely of the best", "all three", "of one", "stops, later"),
    *("told", "told, drawn of the best"),
}
WEIGHTS = {
    "dense": lambda w: w,
    "int8": quantise_int8,
    "int4": lambda w: quantise_int4(w, 64),
    "codes": lambda w: quantise_int4_codes(w, 32),
}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9},
    "likely": {"temperature": 1.3, "top_p": 0.7},
    "not unlikely": {"temperature": 1.3, "min_p": 0.05},
    "of many": {"temperature": 3.0, "top_k": 300, "top_p": 0.9},
    "of the best": {"temperature": 0.9, "top_k": 9},
    "likely of the best": {"temperature": 0.9, "top_k": 40, "top_p": 0.8},
    "all three": {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    "of one": {"temperature": 0.9, "top_k": 1},
    "penalty": {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
    "bias": {"logit_bias": {"11": 60.0}},
    "stops": {"min_new_tokens": 99, "stop_token_ids": tuple(range(0, VOCAB, 2))},
    "told": {"told": LogprobOptions(top=2)},
    "requested ids": {"told": LogprobOptions(token_ids=(3, 500))},
    "told, drawn": {"temperature": 0.8, "told": LogprobOptions(top=5)},
    "told, drawn of the best": {"temperature": 0.8, "top_k": 3, "told": LogprobOptions(top=20)},
    "stops, later": {"min_new_tokens": 1, "stop_token_ids": tuple(range(0, VOCAB, 2))},
}

WAYS_TO_THE_LARGEST: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_k": 5, "top_p": 1e-6},
    {"told": LogprobOptions(top=3)},
]


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
        self.vocab, width = weight.shape
        limits = ProgramLimits(max_tokens=1, max_outputs=MOST)
        tracer = NativeTracer(dtype, limits, {}, library.constants)
        self.x = tracer.input(width, "bf16" if dtype == torch.bfloat16 else "f32", "outputs")
        self.logits: TracedTensor = ops.linear(self.x, weight, bias, out_f32=True)
        if cap is not None:
            self.logits = ops.softcap(self.logits, cap)
        tracer.pin(self.logits)
        self.program = Program(library, compile_graph(tracer.graph))
        self.library = library

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of all rows."""
        self.program.write(self.x, x)
        self.program.run(StepRun(outputs=len(x)))
        return self.program.read(self.logits, len(x)).clone()

    def sample(
        self, x: torch.Tensor, batch: SamplingBatch, masks: Masks | None = None
    ) -> tuple[SampleOutput, torch.Tensor]:
        """The ids chosen by one call, and the memory of the logits after it."""
        self.program.write(self.x, x)
        memory = self.program.read(self.logits, len(x))
        memory.fill_(UNTOUCHED)
        rows = NativeSamplingRows(batch.params, len(x))
        rows.call.read(memory.data_ptr(), memory.stride(0))
        rows.call.slots[:], rows.call.positions[:] = batch.slots, batch.positions
        rows.call.struct.rows = len(x)
        rows.ready(batch.slots)
        rows.mask(masks)
        run = StepRun(outputs=len(x), sample=ctypes.addressof(rows.call.struct))
        return rows.output(batch.slots, self.program.run(run)), memory.clone()


def batch_of(wishes: Sequence[Mapping[str, Any]], vocab: int = VOCAB) -> SamplingBatch:
    """A row for each wish, four tokens of output behind it."""
    params = SamplingSlots(len(wishes), vocab)
    for slot, wish in enumerate(wishes):
        sampling: dict[str, Any] = {name: value for name, value in wish.items() if name != "told"}
        options = wish.get("told")
        request = GenerateRequest(
            rid=str(slot),
            input_ids=np.arange(3, dtype=np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(**{"temperature": 0.0, "sampling_seed": slot, **sampling}),
            logprobs=options,
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


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [37, MANY])
def test_what_is_no_number_never_wins_and_padding_neither(library: Library, vocab: int) -> None:
    inf = float("inf")
    cases: list[tuple[dict[int, float], float, int | None]] = [
        ({}, -5.0, 0),
        ({vocab - 1: -4.0}, -5.0, vocab - 1),
        ({3: float("nan"), 9: 1.0, 30: 1.0}, -1.0, 9),
        ({20: -3.0}, float("nan"), 20),
        ({20: -0.0, 31: 0.0}, -inf, 20),
        ({8: inf, 4: 3.0}, float("nan"), 8),
        ({}, -inf, None),
        ({}, float("nan"), None),
    ]
    ways = WAYS_TO_THE_LARGEST if vocab == MANY else [{}]
    for dtype in DTYPES:
        for special, others, want in cases:
            bias = torch.full((vocab,), others)
            bias[list(special)] = torch.tensor(list(special.values()))
            head = Head(library, torch.zeros(vocab, 32, dtype=dtype), dtype, bias)
            x = torch.zeros(BATCH, 32, dtype=dtype)

            for wish in ways:
                batch = batch_of([wish] * BATCH, vocab)
                found, memory = head.sample(x, batch)

                assert found.token_ids.tolist() == [want or 0] * BATCH, (special, others)
                assert len(found.errors) == (BATCH if want is None else 0)
                assert (memory == UNTOUCHED).all()
                assert same(found, NativeSampler(library).sample(head.whole(x), batch))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_tokens_and_log_probabilities_are_those_of_whole_rows(library: Library, kind: str) -> None:
    matrix = random(MANY, 64, dtype=torch.bfloat16)
    matrix[700:9000] = matrix[20_700:29_000]  # ties
    head = Head(library, WEIGHTS[kind](matrix), torch.bfloat16)
    names = [*WISHES, "masked"] * 4
    assert BATCH <= len(names) <= MOST
    wishes = [WISHES.get(name, {}) for name in names]
    masked = np.array([i for i, name in enumerate(names) if name == "masked"], np.int32)
    bits = np.zeros((len(masked), -(-MANY // 32)), np.int32)
    bits[:, 3] = 0b10010
    masks = Masks(masked, bits)
    x = random(len(names), 64, dtype=torch.bfloat16, seed=2, scale=0.3)
    batch = batch_of(wishes, MANY)
    want = NativeSampler(library).sample(head.whole(x), batch, masks)

    for threads in (1, 2, 3):
        library.dll.sylvan_threads(threads)
        found, memory = head.sample(x, batch, masks)

        assert same(found, want)
        left = {n for n, row in zip(names, memory, strict=True) if (row == UNTOUCHED).all()}
        assert left == NEVER_WRITTEN
    library.dll.sylvan_threads(2)


def same(found: SampleOutput, want: SampleOutput) -> bool:
    """Bit by bit."""
    assert found.token_ids.tolist() == want.token_ids.tolist()
    assert found.errors == want.errors
    assert set(found.logprobs) == set(want.logprobs)
    for row, told in found.logprobs.items():
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "chosen_logprobs"):
            mine, theirs = getattr(told, name), getattr(want.logprobs[row], name)
            assert (mine is None) == (theirs is None)
            assert mine is None or mine.tobytes() == theirs.tobytes(), (row, name)
    return True


@pytest.mark.slow
@given(
    top_k=st.sampled_from([-1, 1, 2, 15, 16, 17, 63, 133, 134]),
    top_p=st.sampled_from([1.0, 0.999, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.3]),
    temperature=st.sampled_from([0.0, 1e-4, 0.6, 1.0, 20.0]),
    alternatives=st.sampled_from([None, None, 0, 3, 130, 300]),
    spread=st.sampled_from([0.0, 0.02, 1.0, 100.0]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_asked_it_is_that_of_whole_rows(
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
    alternatives: int | None,
    spread: float,
    seed: int,
) -> None:
    library, head = one_head()
    wish: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    wish |= {"temperature": temperature, "sampling_seed": seed}
    if alternatives is not None:
        wish["told"] = LogprobOptions(top=alternatives)
    x = random(BATCH, 64, dtype=torch.bfloat16, seed=seed, scale=spread)
    batch = batch_of([wish] * BATCH, MANY)

    found, _ = head.sample(x, batch)

    assert same(found, NativeSampler(library).sample(head.whole(x), batch))


@functools.cache
def one_head() -> tuple[Library, Head]:
    """Of the best variant, with ties."""
    library = load()
    matrix = random(MANY, 64, dtype=torch.bfloat16)
    matrix[::3] = matrix[0]
    return library, Head(library, matrix, torch.bfloat16)


def test_logits_that_another_op_changes_are_whole(library: Library) -> None:
    head = Head(library, random(VOCAB, WIDTH, dtype=torch.float32), torch.float32, cap=0.5)
    x = random(3, WIDTH, dtype=torch.float32, seed=3, scale=9.0)
    want = head.whole(x).numpy()
    assert ((want == want.max(1, keepdims=True)).sum(1) > 1).all(), "the cap makes equals"

    found, memory = head.sample(x, batch_of([{}] * 3))

    assert found.token_ids.tolist() == want.argmax(1).tolist()
    assert (memory != UNTOUCHED).all()
