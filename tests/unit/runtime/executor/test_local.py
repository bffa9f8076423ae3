from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from sylvan.protocol.errors import ExecutorError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.cache.types import CacheKey, KVHandle, Node
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.core.step import PageCopy
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.control import Checkpoints, ExecutorControl
from sylvan.runtime.executor.immediate import ImmediateBackend
from sylvan.runtime.executor.local import LocalExecutor
from sylvan.runtime.executor.slots import RequestSlots
from sylvan.runtime.executor.worker import StepWorker
from sylvan.runtime.features.embeddings.control import EmbeddingCapability
from sylvan.runtime.features.embeddings.pooling import Pooler
from sylvan.runtime.features.embeddings.worker import EmbeddingsWorker
from sylvan.runtime.features.prompt_logprobs.control import PromptLogprobsCapability
from sylvan.runtime.features.prompt_logprobs.worker import PromptLogprobsWorker
from sylvan.runtime.models.pooling import PoolingSpec
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.runtime.sampling.sampler import Sampler
from sylvan.runtime.sched.capability import Hooks
from sylvan.runtime.sched.plan_builder import PlanBuilder

VOCAB, PAGE = 50, 4


class Successor:
    """The likeliest token after id i at position p is i + p; `gate` holds up, `fail` breaks."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail: str | None = None
        self.seen: list[dict[str, list[int]]] = []
        self.largest = 0

    def run(self, batch: ForwardBatch, *, graph: bool = False) -> torch.Tensor:
        assert self.gate.wait(30)
        if self.fail:
            raise RuntimeError(self.fail)
        self.ids, self.positions = batch.input_ids_T.clone(), batch.positions_T.clone()
        names = ("input_ids_T", "positions_T", "slot_mappings", "kv_lens_R", "q_starts_R")
        self.seen.append({name: getattr(batch, name).tolist() for name in names})
        return self.logits(batch.sample_rows.numpy())

    def logits(self, rows: np.ndarray) -> torch.Tensor:
        self.largest = max(self.largest, len(rows))
        index = torch.from_numpy(rows).long()
        wanted = (self.ids[index] + self.positions[index]).long() % VOCAB
        return torch.nn.functional.one_hot(wanted, VOCAB).float() * 9

    def hidden(self, rows: np.ndarray) -> torch.Tensor:
        return self.ids[torch.from_numpy(rows).long()].float()[:, None]

    def fuse(self, *parts) -> None:
        return None


class Bench:
    def __init__(self, *, overlap: bool = False, sampler=None, pooler=None) -> None:
        self.runner = Successor()
        shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, num_pages=40, page_size=PAGE)
        self.pool = MHAPool(shape, torch.float32)
        limits = BatchLimits(max_tokens=64, max_reqs=4, max_pages_per_req=8)
        batch = ForwardBatch(limits, self.pool, NullAttention())
        slots = RequestSlots(limits.max_reqs, VOCAB)
        backend = ImmediateBackend(self.runner, batch, sampler or Sampler(), slots)
        halves = [PromptLogprobsWorker(), *([EmbeddingsWorker(pooler)] if pooler else [])]
        caps = ExecutorCaps(max_batch_tokens=64, max_running_reqs=4)
        control = ExecutorControl("there are none", {}, self.pool.groups, Checkpoints())
        worker = StepWorker(backend, slots, halves, control.gate)
        self.executor = LocalExecutor(worker, caps, control, overlap=overlap)
        self.builder = PlanBuilder(caps.max_running_reqs)
        self.hooks = Hooks(
            (PromptLogprobsCapability(), *([EmbeddingCapability(pools_all=True)] if pooler else []))
        )
        self._page = 1

    def req(self, *ids: int, request=None, **fields) -> Req:
        sampling = {"temperature": 0.0, "sampling_seed": 1} | fields.pop("sampling", {})
        request = request or GenerateRequest(
            rid=f"r{self._page}",
            input_ids=np.array(ids, np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(**sampling),
            **fields,
        )
        made, empty = Req(request), np.empty(0, np.int32)
        pages = np.arange(self._page, self._page + 4, dtype=np.int32)
        made.kv = KVHandle(Node(empty, empty, None), CacheKey(empty), pages, 4, 0, 0)
        self._page += 4
        return made

    def launch(self, *work: tuple[Req, int, int], **fields):
        slices = tuple(Slice(r, a, b, b == r.num_tokens) for r, a, b in work)
        batch = Batch(slices, **fields)
        self.hooks.launch(batch, [piece for piece in slices if piece.start == 0])
        pending = self.executor.launch(self.builder.build(batch, self.hooks.plan_work(batch)))
        for piece in slices:
            piece.req.pending += piece.samples
        return pending

    def ids(self, pending) -> list[list[int]]:
        return [list(out.token_ids) for out in pending.wait().outputs]


@pytest.fixture(params=[False, True], ids=["inline", "overlap"])
def bench(request):
    bench = Bench(overlap=request.param)
    yield bench
    bench.runner.gate.set()
    bench.executor.close()


def test_mixed_batch_is_laid_out_row_by_row(bench):
    a, b = bench.req(7, 8, 9, 10, 11), bench.req(3, 4)
    bench.launch((a, 0, 3)).wait()

    result = bench.launch((a, 3, 5), (b, 0, 2))

    assert bench.ids(result) == [[15], [5]]
    assert bench.runner.seen[-1] == {
        "input_ids_T": [10, 11, 3, 4],
        "positions_T": [3, 4, 0, 1],
        "slot_mappings": [[1 * PAGE + 3, 2 * PAGE, 5 * PAGE, 5 * PAGE + 1]],
        "kv_lens_R": [5, 2],
        "q_starts_R": [0, 2, 4],
    }


def test_chunks_sample_nothing_until_the_last(bench):
    a = bench.req(1, 2, 3)

    assert bench.ids(bench.launch((a, 0, 2))) == [[]]
    assert bench.ids(bench.launch((a, 2, 3))) == [[5]]


def test_ids_in_flight_are_fed_from_the_step_before(bench):
    a = bench.req(1, 2)
    steps = [bench.launch((a, 0, 2)), bench.launch((a, 2, 3)), bench.launch((a, 3, 4))]

    found = [bench.ids(step) for step in steps]

    assert found == [[[3]], [[5]], [[8]]]


def test_launch_returns_while_the_step_runs():
    bench = Bench(overlap=True)
    bench.runner.gate.clear()
    a = bench.req(1, 2)

    first = bench.launch((a, 0, 2))
    second = bench.launch((a, 2, 3))
    a.tokens.truncate(0)
    before = first.done(), second.done()
    bench.runner.gate.set()

    assert bench.ids(second) == [[5]]
    assert before == (False, False)
    assert first.done()
    bench.executor.close()


def test_a_failed_forward_is_an_executor_error_and_the_next_step_runs(bench):
    a, b = bench.req(1, 2), bench.req(5)
    bench.runner.fail = "out of sorts"
    broken = bench.launch((a, 0, 2))
    with pytest.raises(ExecutorError, match="out of sorts"):
        broken.wait()
    bench.runner.fail = None

    assert bench.ids(bench.launch((b, 0, 1), ended=(a.rid,))) == [[5]]


def test_an_empty_step_is_legal(bench):
    assert bench.launch(ended=("nobody",)).wait().outputs == []


def test_pages_are_copied_before_the_forward(bench):
    keys, _ = bench.pool.layer(0)
    keys[9] = 3.0

    bench.launch((bench.req(1), 0, 1), copies=(PageCopy(9, 12, 2),)).wait()

    assert keys[12, :2].eq(3.0).all()
    assert keys[12, 2:].eq(0.0).all()


class Picky(Sampler):
    """Breaks on one seed, wherever it stands in the batch."""

    def sample(self, logits_RV, batch, masks=None):
        if (batch.params.seed[batch.slots] == 13).any():
            raise ValueError("thirteen")
        return super().sample(logits_RV, batch, masks)


def test_a_request_that_breaks_sampling_fails_alone():
    bench = Bench(sampler=Picky())
    good, bad = bench.req(1, 2), bench.req(3, sampling={"sampling_seed": 13})

    out = bench.launch((good, 0, 2), (bad, 0, 1), (bench.req(9), 0, 1)).wait().outputs

    assert [list(o.token_ids) for o in out] == [[3], [], [9]]
    assert [o.error for o in out] == ["", "sampling failed: thirteen", ""]


def test_unusable_parameters_fail_their_request_only():
    bench = Bench()
    bad = bench.req(3, sampling={"logit_bias": {"three": 1.0}})
    good = bench.req(1, 2)

    out = bench.launch((bad, 0, 1), (good, 0, 2)).wait().outputs

    assert out[0].error.startswith("sampling parameters cannot be used")
    assert list(out[1].token_ids) == [3]


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
def test_ids_outside_the_vocabulary_fail_their_request_only(token):
    bench = Bench()

    out = bench.launch((bench.req(3, token), 0, 2), (bench.req(1, 2), 0, 2)).wait().outputs

    assert out[0].error == "token ids must be in 0..49"
    assert list(out[1].token_ids) == [3]


def test_prompt_logprobs_come_in_bounded_blocks(bench):
    ids = tuple(range(1, 14))
    a = bench.req(*ids, logprobs=LogprobOptions(start=2, top=1))

    first, second = bench.launch((a, 0, 7)).wait(), bench.launch((a, 7, 13)).wait()

    parts = [step.reports[PromptLogprobsCapability.name][0] for step in (first, second)]
    assert [p.token_ids.tolist() for p in parts] == [list(ids[3:8]), list(ids[8:13])]
    assert np.concatenate([p.top_ids[:, 0] for p in parts]).tolist() == [
        ids[i] + i for i in range(2, 12)
    ]
    assert bench.runner.largest <= 4


def test_embeddings_pool_the_rows_of_their_request():
    request = EmbedRequest(rid="e", input_ids=np.array([4, 6], np.int32))
    bench = Bench(pooler=Pooler(PoolingSpec(modes=("mean",), normalize=False)))

    result = bench.launch((bench.req(1), 0, 1), (bench.req(request=request), 0, 2)).wait()

    assert {i: v.tolist() for i, v in result.reports[EmbeddingCapability.name].items()} == {
        1: [5.0]
    }
    assert list(result.outputs[0].token_ids) == [1]


def test_many_requests_pass_through_few_slots(bench):
    ended: tuple[str, ...] = ()
    for i in range(20):
        bench._page = 1 + 4 * (i % 9)
        request = GenerateRequest(
            rid=f"q{i}",
            input_ids=np.array([i], np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(temperature=0.0, sampling_seed=1),
        )
        assert bench.ids(bench.launch((bench.req(request=request), 0, 1), ended=ended)) == [[i]]
        ended = (f"q{i}",)
