"""Sampling without sorting against the definition in the runtime's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels.sample.device import LogitEdits, RowParams
from sylvan.kernels.sample.triton_sample import draw, edit
from sylvan.runtime.sampling import draw as definition
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.params import NO_TOP_K, SamplingBatch, SamplingSlots
from sylvan.runtime.sampling.processors import apply_masks
from tests.support.chosen import more
from tests.support.tensors import home, ints, put

VOCABS = pytest.mark.parametrize("vocab", [300, *more(9001)])
CASES: list[dict[str, float]] = [
    {"greedy": True},
    {},
    {"temperature": 0.05},
    {"temperature": 5.0},
    {"top_k": 7},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    {"top_k": 5, "top_p": 0.9},
    {"top_p": 0.7, "min_p": 0.05, "temperature": 2.0},
]
WIDE: list[dict[str, float]] = [  # filters that leave much, or border on nothing and on everything
    {"top_k": 120},
    {"top_k": 197},
    {"top_k": 198},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 1.0},
    {"min_p": 1e-4},
    {"top_k": 150, "top_p": 0.55},
    {"top_k": 60, "min_p": 0.3},
    {"top_k": 150, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 2, "top_p": 0.99, "min_p": 0.5},
]


def slots(cases: list[dict[str, float]], vocab: int) -> SamplingSlots:
    found = SamplingSlots(len(cases), vocab)
    found.greedy[:] = False
    found.seed[:] = np.arange(len(cases)) + (1 << 40)
    found.sample[:] = 3
    for slot, case in enumerate(cases):
        for name, value in case.items():
            getattr(found, name)[slot] = value
    return found


def rows(params: SamplingSlots, positions: np.ndarray) -> RowParams:
    def tensor(x: np.ndarray) -> torch.Tensor:
        return put(torch.from_numpy(x.copy()))

    return RowParams(
        greedy=tensor(params.greedy),
        temperature=tensor(params.temperature),
        top_k=tensor(np.minimum(params.top_k, NO_TOP_K).astype(np.int32)),
        top_p=tensor(params.top_p),
        min_p=tensor(params.min_p),
        seed=tensor(params.seed),
        sample=tensor(params.sample),
        position=tensor(positions),
    )


def both(logits: torch.Tensor, cases: list[dict[str, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    params = slots(cases, logits.shape[1])
    positions = np.arange(len(cases)) * 1000003 + (1 << 33)
    index = np.arange(len(cases), dtype=np.int32)
    want = definition.draw(logits.clone(), SamplingBatch(index, positions, params))
    drawn = home(draw(put(logits), rows(params, positions)))
    temperature = torch.from_numpy(params.temperature)[:, None]
    logprobs = torch.log_softmax(logits / temperature, -1)
    mine = logprobs.gather(1, drawn.ids.long()[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, mine, rtol=1e-4, atol=1e-4)
    whole = torch.logsumexp(logits / temperature, -1)
    torch.testing.assert_close(drawn.logsumexp, whole, rtol=1e-4, atol=1e-4)
    return drawn.ids, want


@VOCABS
def test_rows_with_their_own_parameters_draw_what_the_definition_draws(vocab: int) -> None:
    logits = 3 * torch.randn(len(CASES), vocab, generator=torch.Generator().manual_seed(3))

    got, want = both(logits, CASES)

    assert got.tolist() == want.tolist()


@VOCABS
def test_equal_logits_are_taken_in_order_of_ids(vocab: int) -> None:
    logits = torch.zeros(len(CASES), vocab)
    logits[:, ::2] = 1.0

    got, want = both(logits, CASES)

    assert got.tolist() == want.tolist()


def rows_like(kind: str, count: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(count, vocab, generator=generator)
    if kind == "flat":
        return normal / 10
    if kind == "very flat":
        return normal / 1000
    if kind == "few levels":
        return torch.randint(0, 3, (count, vocab), generator=generator).float()
    if kind == "all equal":
        return torch.full((count, vocab), -2.5)
    if kind == "together":  # what is likely lies in a few parts
        normal[:, 70:130] += 9.0
        return normal
    assert kind == "masked"
    forbidden = torch.rand(count, vocab, generator=generator) < 0.7
    forbidden[:, 5] = False
    forbidden[-1] = True
    forbidden[-1, 77] = False  # nothing else is left
    return (4 * normal).masked_fill(forbidden, float("-inf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["flat", "very flat", "few levels", "all equal", "together", "masked"]
)
@pytest.mark.parametrize("vocab", [198, *more(9001)])
def test_candidates_may_be_few_many_or_equal(kind: str, vocab: int) -> None:
    got, want = both(rows_like(kind, len(WIDE), vocab), WIDE)

    assert got.tolist() == want.tolist()


def test_a_row_has_the_same_bits_alone_and_without_filters_beside_it() -> None:
    logits = 2 * torch.randn(3, 150, generator=torch.Generator().manual_seed(6))
    params = slots([{}, {"top_p": 0.9}, {"temperature": 0.7}], 150)
    position = np.arange(3)

    together = home(draw(put(logits), rows(params, position)))

    for row in range(3):
        chosen = [row]
        alone = slots([{"top_p": 0.9} if row == 1 else {}], 150)
        alone.seed[:], alone.temperature[:] = params.seed[row], params.temperature[row]
        mine = rows(alone, position[chosen])
        drawn = home(draw(put(logits[chosen]), mine, filtered=row == 1))
        for name in ("ids", "logprobs", "logsumexp"):
            assert torch.equal(getattr(drawn, name), getattr(together, name)[chosen])


def test_what_is_not_a_number_never_wins() -> None:
    logits = torch.full((4, 40), float("-inf"))
    logits[0, [3, 5]] = torch.tensor([float("nan"), 1.0])
    logits[1, [3, 5]] = torch.tensor([0.0, float("inf")])
    logits[2, 7] = -50.0
    params = slots([{"greedy": True}, {}, {"temperature": 0.1}, {}], 40)

    drawn = draw(put(logits), rows(params, np.arange(4)))

    assert drawn.ids.tolist() == [5, 5, 7, -1]  # the last row has no token left
    assert torch.isinf(drawn.logprobs[3])


@pytest.mark.parametrize("vocab", [70, *more(5000)])
def test_edits_come_in_the_order_of_the_contract(vocab: int) -> None:
    generator = torch.Generator().manual_seed(4)
    want = torch.randn(3, vocab, generator=generator)
    logits = put(want.clone())
    counts = torch.randint(0, 3, (2, vocab), generator=generator).float()
    words = (1, -(-vocab // 32))
    bits = torch.randint(-(2**31), 2**31 - 1, words, generator=generator, dtype=torch.int32)
    frequency, presence = torch.tensor([0.5, 0.0, 0.1]), torch.tensor([0.0, 9.0, -1.0])
    repetition = torch.tensor([1.0, 9.0, 1.5])
    for row, at in ((0, 1), (2, 0)):
        seen = counts[at] > 0
        less = want[row] - frequency[row] * counts[at] - presence[row]
        scaled = torch.where(less > 0, less / repetition[row], less * repetition[row])
        want[row] = torch.where(seen, scaled, want[row])
    apply_masks(want, Masks(np.array([1], np.int32), bits.numpy()))
    want[0, 5] += 2.0
    want[2, 69] = float("-inf")

    edit(
        logits,
        LogitEdits(
            counts=put(counts),
            count_rows=ints([1, -1, 0]),
            frequency=put(frequency),
            presence=put(presence),
            repetition=put(repetition),
            mask_bits=put(bits),
            mask_rows=ints([-1, 0, -1]),
            entry_rows=ints([0, 2, 2]),
            entry_ids=ints([5, 69, 69]),
            entry_values=put(torch.tensor([2.0, float("-inf"), 1.0])),
        ),
    )

    torch.testing.assert_close(home(logits), want)
