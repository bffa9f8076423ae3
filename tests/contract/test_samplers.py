"""Every implementation of `TokenSampler` does what the slow definition does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels.native.library import load
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.sampling import draw
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.params import NO_TOP_K, SamplingBatch, SamplingSlots
from sylvan.runtime.sampling.sampler import Sampler
from tests.support.native import variants
from tests.unit.runtime.sampling.slow import choose, final_logits

VOCAB = 90
PROMPT = np.arange(5, dtype=np.int32)


def ask(
    *, sample: int = 0, logprobs: LogprobOptions | None = None, eos=(2,), **sampling
) -> GenerateRequest:
    params = {"sampling_seed": 7, "max_new_tokens": 99} | sampling
    return GenerateRequest(
        rid="r",
        input_ids=PROMPT,
        output_ids=np.empty(0, np.int32),
        sampling=SamplingParams(**params),
        sample=sample,
        eos_ids=tuple(eos),
        logprobs=logprobs,
    )


class Rows:
    """Requests in slots of a larger table, in an order that is not the slots' own."""

    def __init__(self, requests, outputs=None, vocab=VOCAB) -> None:
        self.slots = np.arange(len(requests), dtype=np.int32)[::-1] * 2 + 1
        self.params = SamplingSlots(2 * len(requests) + 1, vocab)
        self.outputs = outputs or [[] for _ in requests]
        for slot, request, out in zip(self.slots, requests, self.outputs, strict=True):
            self.params.join(slot, request, np.array(out, np.int32))

    def batch(self) -> SamplingBatch:
        positions = np.array([len(PROMPT) + len(out) for out in self.outputs], np.int64)
        return SamplingBatch(self.slots, positions, self.params)


def logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def random_request(rng: np.random.Generator) -> GenerateRequest:
    def one(*values):
        return values[rng.integers(len(values))]

    return ask(
        temperature=one(0.0, 1e-7, 0.3, 1.0, 1.7),
        top_k=one(-1, 1, 2, 7, 1000),
        top_p=one(1.0, 0.9, 0.4, 0.01),
        min_p=one(0.0, 0.0, 0.05, 0.5, 1.0),
        frequency_penalty=one(0.0, 0.7, -1.5),
        presence_penalty=one(0.0, 2.0, -0.5),
        repetition_penalty=one(1.0, 1.3, 0.5),
        min_new_tokens=one(0, 3),
        stop_token_ids=one((), (4, 60)),
        logit_bias=one({}, {"3": 5.0, "11": -100.0}),
        sampling_seed=int(rng.integers(-(2**63), 2**63)),
        sample=int(rng.integers(9)),
    )


@pytest.fixture(params=["torch", "torch with few candidates", *variants()])
def sampler(request, monkeypatch):
    if request.param == "torch with few candidates":
        monkeypatch.setattr(draw, "CANDIDATES", 12)
    if request.param.startswith("torch"):
        return Sampler()
    return native(request.param)


def native(variant: str) -> NativeSampler:
    library = load(variant)
    library.dll.sylvan_threads(2)
    return NativeSampler(library)


def test_mixed_batches_equal_the_definition(sampler):
    rng = np.random.default_rng(1)
    for trial in range(12):
        requests = [random_request(rng) for _ in range(40)]
        outputs = [rng.integers(0, VOCAB, rng.integers(0, 30)).tolist() for _ in requests]
        rows, values = Rows(requests, outputs), logits(40, seed=trial)
        values[::5] = values[::5].round()  # many ties

        expected = [choose(*x) for x in zip(values.tolist(), requests, outputs, strict=True)]
        found = sampler.sample(values, rows.batch())

        assert found.token_ids.tolist() == expected
        assert found.errors == {}


def test_a_row_does_not_depend_on_the_others(sampler):
    rng = np.random.default_rng(2)
    requests = [random_request(rng) for _ in range(30)]
    together = sampler.sample(logits(30), Rows(requests).batch()).token_ids

    alone = [
        sampler.sample(logits(30)[i : i + 1], Rows([r]).batch()).token_ids[0]
        for i, r in enumerate(requests)
    ]

    assert together.tolist() == alone


def test_draws_follow_the_distribution(sampler):
    n, vocab = 20_000, 8
    row = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -9.0]])
    request = ask(temperature=0.8, sampling_seed=11)
    params = SamplingSlots(1, vocab)
    params.join(0, request, np.empty(0, np.int32))
    batch = SamplingBatch(np.zeros(n, np.int32), np.arange(n), params)

    found = sampler.sample(row.repeat(n, 1), batch).token_ids

    expected = torch.softmax(row[0] / 0.8, 0).numpy() * n
    common = expected > 5
    counts = np.bincount(found, minlength=vocab)
    chi2 = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert chi2 < 22.5, "0.1% of fair samplers exceed this with 6 degrees of freedom"


def test_renormalised_draws_follow_the_distribution(sampler):
    n = 20_000
    row = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    params = SamplingSlots(1, 4)
    params.join(0, ask(top_k=2, sampling_seed=5), np.empty(0, np.int32))
    batch = SamplingBatch(np.zeros(n, np.int32), np.arange(n), params)

    counts = np.bincount(sampler.sample(row.repeat(n, 1), batch).token_ids, minlength=4)

    assert counts[0] == counts[3] == 0
    p = 1 / (1 + np.exp(-1.0))
    assert abs(counts[1] / n - p) < 4 * (p * (1 - p) / n) ** 0.5


def test_greedy_takes_the_lowest_id_of_equals(sampler):
    values = torch.zeros(3, VOCAB)
    values[:, [9, 4, 70]] = 1.0

    for extra in ({}, {"logit_bias": {"1": -1.0}}):
        rows = Rows([ask(temperature=0, **extra), ask(top_k=1, **extra), ask(temperature=0)])
        assert sampler.sample(values.clone(), rows.batch()).token_ids.tolist() == [4, 4, 4]


def test_counts_follow_what_was_sampled(sampler):
    request = ask(temperature=0, frequency_penalty=1.0)
    rows, taken = Rows([request]), []
    for _ in range(6):
        values = torch.zeros(1, VOCAB)
        values[0, :3] = torch.tensor([2.5, 2.0, 1.0])
        expected = choose(values[0].tolist(), request, taken)

        out = sampler.sample(values, rows.batch())
        rows.params.sampled(rows.slots, out.token_ids)

        assert out.token_ids.tolist() == [expected]
        taken.append(expected)
    assert set(taken) == {0, 1, 2}


def test_a_slot_forgets_its_last_request(sampler):
    rows = Rows([ask(temperature=0, frequency_penalty=2.0, logit_bias={"1": 50.0})], [[0, 0, 0]])
    slot = rows.slots[0]
    rows.params.leave(slot)
    rows.params.join(slot, ask(temperature=0, presence_penalty=0.1), np.empty(0, np.int32))
    values = torch.zeros(1, VOCAB)
    values[0, 0] = 1.0

    assert sampler.sample(values, rows.batch()).token_ids.tolist() == [0]


def test_many_penalised_requests_get_rows_of_their_own(sampler):
    outputs = [[i] * 3 for i in range(20)]
    rows = Rows([ask(temperature=0, presence_penalty=2.0) for _ in outputs], outputs)
    values = torch.zeros(20, VOCAB)
    values[range(20), range(20)] = 1.0
    values[:, 50] = 0.5

    assert sampler.sample(values, rows.batch()).token_ids.tolist() == [50] * 20


def test_no_stop_before_the_least_length(sampler):
    request = ask(temperature=0, min_new_tokens=2, stop_token_ids=(5,), eos=(2, 8))
    rows = Rows([request] * 3, [[], [1], [1, 1]])
    values = torch.zeros(3, VOCAB)
    values[:, [2, 5, 8]] = torch.tensor([9.0, 8.0, 7.0])
    values[:, 30] = 1.0

    assert sampler.sample(values, rows.batch()).token_ids.tolist() == [30, 30, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_a_number_never_wins(sampler, temperature):
    values = torch.full((2, VOCAB), float("nan"))
    values[:, 6] = -5.0
    rows = Rows([ask(temperature=temperature), ask(temperature=temperature, top_p=0.5)])

    found = sampler.sample(values, rows.batch())

    assert found.token_ids.tolist() == [6, 6]
    assert found.errors == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_row_without_possible_tokens_fails_alone(sampler, temperature, value):
    values = torch.zeros(3, VOCAB)
    values[:, 5] = 1e4
    values[1] = value
    rows = Rows([ask(temperature=temperature)] * 3)

    found = sampler.sample(values, rows.batch())

    assert set(found.errors) == {1}
    assert found.token_ids[[0, 2]].tolist() == [5, 5]


def test_extreme_numbers_stay_finite(sampler):
    values = torch.zeros(2, VOCAB)
    values[0, 3] = float("inf")
    values[1, 4] = 3e38
    rows = Rows([ask(temperature=1e-5), ask(temperature=1e6, top_k=1000, min_p=0.5)])

    found = sampler.sample(values, rows.batch())

    assert found.token_ids.tolist() == [3, 4]


def test_ids_outside_the_vocabulary_are_ignored(sampler):
    request = ask(temperature=0, logit_bias={"100000": 9.0}, stop_token_ids=(100000,), eos=(-1,))
    values = torch.zeros(1, VOCAB)
    values[0, 7] = 1.0

    assert sampler.sample(values, Rows([request]).batch()).token_ids.tolist() == [7]


def test_logprobs_are_of_the_scaled_final_logits(sampler):
    options = LogprobOptions(top=3, token_ids=(4, 80))
    requests = [
        ask(temperature=0.5, logit_bias={"9": 2.0}, logprobs=options),
        ask(temperature=0.0, frequency_penalty=0.5, logprobs=options),
        ask(),
    ]
    outputs = [[], [1, 1], []]
    values = logits(3)
    finals = [final_logits(*x) for x in zip(values.tolist(), requests, outputs, strict=True)]

    found = sampler.sample(values, Rows(requests, outputs).batch())

    assert set(found.logprobs) == {0, 1}
    for row, scale in ((0, 0.5), (1, 1.0)):
        expected = torch.log_softmax(torch.tensor(finals[row]) / scale, -1).numpy()
        part, token = found.logprobs[row], found.token_ids[row]
        assert part.token_ids.tolist() == [token]
        assert part.logprobs[0] == pytest.approx(expected[token], abs=1e-5)
        assert part.top_ids[0].tolist() == np.argsort(-expected)[:3].tolist()
        assert part.top_logprobs[0] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-5)
        assert part.chosen_logprobs[0] == pytest.approx(expected[[4, 80]], abs=1e-5)


def test_more_alternatives_than_tokens_are_cut(sampler):
    request = ask(temperature=0, logprobs=LogprobOptions(top=10**6))

    part = sampler.sample(logits(1), Rows([request]).batch()).logprobs[0]

    assert part.top_ids.shape == (1, VOCAB)


def even_ids(rows):
    """A grammar that allows even ids, on some rows."""
    bits = np.full((len(rows), -(-VOCAB // 32)), 0x55555555, dtype=np.int32)
    return Masks(np.array(rows, np.int32), bits)


@pytest.mark.parametrize("bias", [{}, {"3": 1e-3}])
@pytest.mark.parametrize(
    ("masked", "expected"), [([0, 2], [64, 33, 64, 33]), ([0, 1, 2, 3], [64] * 4)]
)
def test_masks_forbid_tokens_of_their_rows(sampler, masked, expected, bias):
    values = torch.zeros(4, VOCAB)
    values[:, 33] = 9.0
    values[:, 64] = 1.0
    rows = Rows([ask(temperature=0, logit_bias=bias)] * 4)

    found = sampler.sample(values, rows.batch(), even_ids(masked))

    assert found.token_ids.tolist() == expected


def test_a_mask_without_any_token_fails_its_row_only(sampler):
    rows = Rows([ask(temperature=0.7), ask(temperature=0.7)])
    nothing = Masks(np.array([1], np.int32), np.zeros((1, -(-VOCAB // 32)), np.int32))

    found = sampler.sample(torch.zeros(2, VOCAB), rows.batch(), nothing)

    assert list(found.errors) == [1]


def test_custom_processors_come_after_the_bias():
    def forget(values, batch):
        values[:, 12] = -1e9

    rows = Rows([ask(temperature=0, logit_bias={"12": 100.0, "40": 50.0})])

    found = Sampler(custom=[forget]).sample(torch.zeros(1, VOCAB), rows.batch())

    assert found.token_ids.tolist() == [40]


def test_prompt_logprobs_are_those_of_softmax(sampler):
    ids = np.array([4, 0, VOCAB - 1, 33], np.int32)
    expected = torch.log_softmax(logits(4), -1)

    part = sampler.token_logprobs(logits(4), ids, LogprobOptions(top=5, token_ids=(7, 10**6)))

    assert part.token_ids.tolist() == ids.tolist()
    assert part.logprobs == pytest.approx(expected[range(4), ids.tolist()].numpy(), abs=1e-5)
    assert part.top_ids.tolist() == expected.topk(5).indices.tolist()
    assert part.top_logprobs == pytest.approx(expected.topk(5).values.numpy(), abs=1e-5)
    assert part.chosen_logprobs == pytest.approx(expected[:, [7, -1]].numpy(), abs=1e-5)


ROWS = 64
CASES = {
    "greedy": {"greedy": True},
    "plain": {},
    "cold": {"temperature": 0.05},
    "hot": {"temperature": 5.0},
    "top k": {"top_k": 7},
    "top k of one": {"top_k": 1},
    "large top k": {"top_k": 600, "temperature": 9.0},
    "top p": {"top_p": 0.6},
    "hot top p": {"top_p": 0.97, "temperature": 9.0},
    "tiny top p": {"top_p": 1e-6},
    "min p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
    "top p of all, and min p": {"top_p": 0.7, "min_p": 0.01},
    "k beyond the vocabulary": {"top_k": NO_TOP_K, "top_p": 0.95},
    "each its own": {
        "top_k": np.where(np.arange(ROWS) % 3 == 0, 5, NO_TOP_K),
        "top_p": np.where(np.arange(ROWS) % 2 == 0, 0.5, 1.0),
        "temperature": np.linspace(0.1, 3, ROWS),
    },
}


def table(vocab: int, columns: dict[str, object]) -> SamplingSlots:
    found = SamplingSlots(ROWS, vocab)
    found.greedy[:] = False
    found.seed[:] = np.arange(ROWS)
    for name, value in columns.items():
        getattr(found, name)[:] = value
    return found


def everything(params: SamplingSlots) -> SamplingBatch:
    return SamplingBatch(np.arange(ROWS, dtype=np.int32), np.arange(ROWS, dtype=np.int64), params)


@pytest.fixture(params=variants())
def other(request) -> NativeSampler:
    return native(request.param)


@pytest.mark.parametrize("vocab", [5, 1003])
@pytest.mark.parametrize("name", CASES)
def test_native_draws_what_torch_draws(other, name, vocab):
    values = np.random.default_rng(3).normal(0, 3, (ROWS, vocab)).astype(np.float32)
    batch = everything(table(vocab, CASES[name]))

    want = Sampler().sample(torch.from_numpy(values.copy()), batch).token_ids
    got = other.sample(torch.from_numpy(values.copy()), batch).token_ids

    # The exponentials differ in the last digit, which may move a draw across a border.
    assert (got != want).sum() <= 1


@pytest.mark.parametrize("ask_for", [{"top_k": 2}, {"top_p": 0.02}, {"top_k": 3, "min_p": 0.1}])
def test_the_larger_logits_are_kept_even_where_probabilities_round_to_one(sampler, ask_for):
    values = torch.full((20, VOCAB), -5e3)
    values[:, :3] = torch.tensor([1.0, 1.001, 1.002])
    requests = [ask(temperature=1e6, sampling_seed=i, **ask_for) for i in range(20)]
    expected = [choose(row, r, []) for row, r in zip(values.tolist(), requests, strict=True)]

    found = sampler.sample(values, Rows(requests).batch()).token_ids

    assert found.tolist() == expected


@pytest.mark.parametrize("name", CASES)
def test_native_takes_equal_logits_in_order_of_ids(other, name):
    values = torch.zeros(ROWS, 48)
    values[:, ::2] = 1.0
    batch = everything(table(48, CASES[name]))

    want = Sampler().sample(values.clone(), batch).token_ids
    got = other.sample(values.clone(), batch).token_ids

    assert (got != want).sum() <= 1


def test_native_alternatives_of_equals_come_by_rising_id(other):
    part = other.token_logprobs(torch.zeros(1, VOCAB), np.zeros(1, np.int32), LogprobOptions(top=4))

    assert part.top_ids.tolist() == [[0, 1, 2, 3]]
    assert part.chosen_logprobs is None


def test_native_log_probabilities_do_not_depend_on_the_batch(other):
    options = LogprobOptions(top=3, token_ids=(1,))
    requests = [
        ask(temperature=0.3 + i / 9, top_p=0.9, logprobs=options if i % 2 else None)
        for i in range(9)
    ]
    together = other.sample(logits(9, 1003), Rows(requests, vocab=1003).batch())

    for i, request in enumerate(requests):
        alone = other.sample(logits(9, 1003)[i : i + 1], Rows([request], vocab=1003).batch())
        assert alone.token_ids[0] == together.token_ids[i]
        for name in ("logprobs", "top_ids", "top_logprobs", "chosen_logprobs"):
            if i % 2:
                mine, theirs = alone.logprobs[0], together.logprobs[i]
                assert getattr(mine, name).tobytes() == getattr(theirs, name).tobytes()
