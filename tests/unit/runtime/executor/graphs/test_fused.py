"""One native call a step gives what inputs by numpy, a forward and a sampler apart give."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from sylvan.kernels.native.library import describe, load
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.executor.immediate import ImmediateBackend
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.sampler import Sampler
from tests.unit.runtime.executor.graphs.test_program import LIMITS, PAGE, SHAPE, VOCAB, model_of

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

REQUESTS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 1.5, "logit_bias": {"7": 2.0}},
    {"temperature": 1.2, "min_p": 0.02, "min_new_tokens": 3, "stop_token_ids": (1, 2, 3)},
)


def request(slot: int) -> GenerateRequest:
    return GenerateRequest(
        rid=str(slot),
        input_ids=np.arange(5 + slot, dtype=np.int32),
        output_ids=np.empty(0, np.int32),
        sampling=SamplingParams(sampling_seed=slot, **REQUESTS[slot]),
        logprobs=LogprobOptions(top=2) if slot == 1 else None,
    )


def plan(slices: list[tuple[int, int, int, bool]], ids: list[int], fed: list[int]) -> StepPlan:
    """Slices (slot, start, stop, samples); rows in `fed` take what their slot sampled last."""
    slots, starts, stops, samples = (list(column) for column in zip(*slices, strict=True))
    of_row = [slot for slot, start, stop, _ in slices for _ in range(start, stop)]
    chosen = [i for i, wanted in enumerate(samples) if wanted]
    numbers = [*slots, *starts, *stops, *chosen, *fed, *(of_row[row] for row in fed), *ids]
    packed = np.frombuffer(array("i", numbers), np.int32)
    return StepPlan(
        num_slices=len(slices),
        num_tokens=len(ids),
        num_samples=len(chosen),
        num_in_flight=len(fed),
        numbers=packed,
    )


class Served:
    def __init__(self, *, fused: bool) -> None:
        pool, self.batch = NativePool(SHAPE, torch.float32), None
        runner = ProgramRunner(
            model_of(torch.float32), LIMITS, pool, load(), dtype=torch.float32, threads=2
        )
        self.batch = ForwardBatch(LIMITS, pool, NullAttention())
        self.batch.host.page_table[:3] = 1 + np.arange(60, dtype=np.int32).reshape(3, 20) % 36
        self.slots = RequestSlots(LIMITS.max_reqs, VOCAB)
        for slot in range(3):
            self.slots.params.join(slot, request(slot), np.empty(0, np.int32))
        sampler = NativeSampler(load())
        self.backend = ImmediateBackend(runner, self.batch, sampler, self.slots)
        assert runner.fuse(self.batch, Sampler(), self.last_token, self.slots.params) is None
        assert self.backend._fused is not None
        if not fused:
            self.backend._fused = None

    @property
    def last_token(self) -> np.ndarray:
        return self.backend._last_token

    @property
    def logits(self) -> torch.Tensor:
        """Of the last step."""
        fused = self.backend._fused
        return self.backend.logits_SV if fused is None else fused.logits()

    def run(self, work: StepPlan, masks: Masks | None = None) -> tuple[list[int], list[bytes]]:
        found = self.backend.step(work, masks).wait()
        self.backend.accept(work, found, {})
        told = [p.logprobs.tobytes() + p.top_ids.tobytes() for p in found.logprobs.values()]
        return found.token_ids.tolist(), told


def test_a_fused_step_is_its_parts():
    first = plan(
        [(0, 0, 5, True), (2, 0, 4, False), (1, 0, 6, True)], [*range(5), *range(4), *range(6)], []
    )
    second = plan([(2, 4, 7, True), (1, 6, 7, True)], [4, 5, 6, 0], [3])
    steps = [first, second]
    for at in range(12):
        decodes = [(0, 5 + at, 6 + at, True), (1, 7 + at, 8 + at, True), (2, 7 + at, 8 + at, True)]
        steps.append(plan(decodes, [0, 0, 0], [0, 1, 2]))
    fused, apart = Served(fused=True), Served(fused=False)

    found = [(fused.run(work), apart.run(work)) for work in steps]

    assert [mine for mine, _ in found] == [theirs for _, theirs in found]
    assert [len(ids) for (ids, _), _ in found] == [2, 2] + [3] * 12
    assert fused.last_token.tolist() == apart.last_token.tolist()


def test_logits_of_greedy_rows_are_never_written():
    work = plan([(0, 0, 5, True), (1, 0, 6, True)], [*range(5), *range(6)], [])
    fused, apart = Served(fused=True), Served(fused=False)

    assert fused.run(work) == apart.run(work)

    rows = zip(fused.logits, apart.logits, strict=True)
    assert [torch.equal(mine, theirs) for mine, theirs in rows] == [False, True]


def test_masks_are_heeded_by_the_one_call_and_forgotten_by_the_next():
    first = plan([(0, 0, 5, True), (1, 0, 6, True)], [*range(5), *range(6)], [])
    decodes = [
        plan([(0, 5 + at, 6 + at, True), (1, 6 + at, 7 + at, True)], [0, 0], [0, 1])
        for at in range(4)
    ]
    bits = np.zeros((1, -(-VOCAB // 32)), np.int32)
    bits[0, 1] = 0b1001
    masks = Masks(np.array([1], np.int32), bits)
    fused, apart = Served(fused=True), Served(fused=False)

    found = [
        (fused.run(work, mask), apart.run(work, mask))
        for work, mask in zip([first, *decodes], [None, masks, None, masks, masks], strict=True)
    ]

    assert [mine for mine, _ in found] == [theirs for _, theirs in found]
    assert {found[i][0][0][1] for i in (1, 3, 4)} <= {32, 35}


def test_positions_and_places_are_those_of_numpy():
    work = plan([(1, 30, 35, True), (0, 3, 4, True)], [5, -1, VOCAB, 7, 8, 9], [5])
    made = {}
    for fused in (True, False):
        served = Served(fused=fused)
        served.last_token[0] = 42
        served.backend.forward(work, graph=False)
        host = served.batch.host
        counts = {"input_ids": 6, "positions": 6, "out_slots": 6, "kv_lens": 2, "q_starts": 3}
        counts |= {"req_slots": 2, "sample_rows": 2}
        made[fused] = {name: getattr(host, name)[:n].tolist() for name, n in counts.items()}

    assert made[True] == made[False]
    assert made[True]["input_ids"] == [5, 0, VOCAB - 1, 7, 8, 42]
    assert made[True]["out_slots"][0] == int(served.batch.host.page_table[1, 1]) * PAGE + 14
