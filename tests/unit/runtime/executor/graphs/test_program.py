"""Step programs: equal bits whatever the company, and a model left intact when refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from sylvan.kernels.api import Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight, quantise_int4, quantise_int8
from sylvan.kernels.native.library import describe, load
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.dummy import dummy_weights
from sylvan.runtime.models.registry import load_family
from sylvan.runtime.pool.mha import KVShape

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

VOCAB, LAYERS, PAGES, PAGE = 300, 2, 40, 16
RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
FORMATS: dict[str, tuple[torch.dtype, Callable]] = {
    "fp32": (torch.float32, lambda w: w),
    "bf16": (torch.bfloat16, lambda w: w),
    "w8a8": (torch.bfloat16, quantise_int8),
    "w4a8": (torch.bfloat16, lambda w: quantise_int4(w, 64)),
}
LIMITS = BatchLimits(max_tokens=256, max_reqs=4, max_pages_per_req=20)
SHAPE = KVShape(num_layers=LAYERS, num_kv_heads=2, head_dim=32, num_pages=PAGES, page_size=PAGE)


def model_of(dtype: torch.dtype) -> nn.Module:
    family = load_family("Qwen3ForCausalLM")
    model = family.model(family.parse(RAW), Build(dtype=dtype, length=512))
    dummy_weights(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.data *= 4
    return model


def convert(model: nn.Module, how: Callable) -> None:
    """Quantise every matrix in place; tied ones stay tied."""
    made: dict[int, DeferredWeight] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                weight = how(parameter.detach().clone())
                deferred = DeferredWeight(parameter.shape, lambda w=weight: w, str(len(made)))
                made.setdefault(id(parameter), deferred)
                delattr(module, name)
                setattr(module, name, made[id(parameter)])


class Served:
    """A program and requests whose pages are scattered over memory full of NaN."""

    def __init__(self, weights: str, threads: int, page_seed: int = 0) -> None:
        dtype, how = FORMATS[weights]
        model = model_of(dtype)
        if how is not FORMATS["bf16"][1]:
            convert(model, how)
        self.pool = NativePool(SHAPE, dtype)
        for layer in self.pool.layers.values():
            layer.keys[:] = layer.values[:] = 0xFF
        library = load()
        self.runner = ProgramRunner(model, LIMITS, self.pool, library, dtype=dtype, threads=threads)
        self.batch = ForwardBatch(LIMITS, self.pool, NullAttention())
        order = np.random.default_rng(page_seed).permutation(PAGES - 1) + 1
        self.batch.host.page_table[:3, :12] = order[:36].reshape(3, 12)

    def step(self, work: dict[int, np.ndarray], starts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Logits of the last row of each request."""
        host, row = self.batch.host, 0
        for i, (r, ids) in enumerate(work.items()):
            rows = slice(row, row + len(ids))
            positions = np.arange(starts[r], starts[r] + len(ids))
            host.input_ids[rows], host.positions[rows] = ids, positions
            pages = host.page_table[r, positions // PAGE]
            host.out_slots[rows] = pages * PAGE + positions % PAGE
            host.kv_lens[i], host.req_slots[i] = positions[-1] + 1, r
            row += len(ids)
            host.q_starts[i + 1], host.sample_rows[i] = row, row - 1
        self.batch.ready(row, len(work), len(work))
        return dict(zip(work, self.runner.run(self.batch).clone(), strict=True))


def prompt(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, size).astype(np.int32)


@pytest.mark.parametrize("weights", FORMATS)
def test_bits_do_not_depend_on_company_chunks_pages_or_threads(weights: str) -> None:
    prompts = {r: prompt(r, n) for r, n in ((0, 150), (1, 33), (2, 4))}
    alone = Served(weights, 1)
    want = {r: alone.step({r: ids}, {r: 0})[r] for r, ids in prompts.items()}
    assert all(torch.isfinite(x).all() for x in want.values())

    for threads, chunk in ((2, 150), (3, 16), (1, 5)):
        served = Served(weights, threads, page_seed=threads)
        got, done = {}, dict.fromkeys(prompts, 0)
        while todo := {
            r: ids[done[r] :][:chunk] for r, ids in prompts.items() if done[r] < len(ids)
        }:
            got |= served.step(todo, done)
            for r, ids in todo.items():
                done[r] += len(ids)
        for r, logits in want.items():
            assert torch.equal(got[r], logits), (threads, chunk, r)


def test_logits_and_hidden_of_other_rows_equal_those_of_the_step() -> None:
    served, ids = Served("bf16", 2), prompt(0, 20)
    last = served.step({0: ids}, {0: 0})[0]
    rows = np.array([19, 3], np.int32)

    again = served.runner.logits(rows).clone()
    hidden = served.runner.hidden(rows)

    assert torch.equal(again[0], last)
    assert torch.equal(served.step({1: ids[:4]}, {1: 0})[1], again[1])
    assert hidden.shape == (2, 128)
    assert hidden.dtype == torch.float32


def test_the_head_takes_vectors_that_are_no_rows() -> None:
    served = Served("w8a8", 2)
    served.step({0: prompt(0, 20)}, {0: 0})
    rows = np.array([19, 3], np.int32)
    hidden, want = served.runner.hidden(rows), served.runner.logits(rows).clone()

    assert torch.equal(served.runner.head(hidden), want)
    assert torch.equal(served.runner.head(hidden[1:]), want[1:])


def test_copied_and_exported_pages_serve_another_request() -> None:
    served, ids = Served("bf16", 1), prompt(0, 40)
    want = served.step({0: ids}, {0: 0})[0]
    table = served.batch.host.page_table
    (memory,) = served.pool.groups
    memory.copy_tokens([(int(table[0, 0]), int(table[1, 0]), PAGE)])
    buffer = memory.host_buffer(1)
    memory.export(table[0, 1:2], buffer).wait()
    memory.import_(table[1, 1:2], buffer).wait()

    got = served.step({1: ids[32:]}, {1: 32})[1]

    assert torch.equal(got, want)


def test_parameters_are_freed_when_packed() -> None:
    model = model_of(torch.bfloat16)
    ProgramRunner(
        model,
        LIMITS,
        NativePool(SHAPE, torch.bfloat16),
        load(),
        dtype=torch.bfloat16,
        threads=1,
    )

    sizes = [p.untyped_storage().nbytes() for p in model.parameters() if p.dim() == 2]
    assert sizes == [0] * len(sizes)


def test_a_model_that_cannot_be_traced_is_left_intact() -> None:
    model = model_of(torch.bfloat16)
    pool = NativePool(
        KVShape(num_layers=1, num_kv_heads=2, head_dim=32, num_pages=2, page_size=PAGE),
        torch.bfloat16,
    )

    with pytest.raises(Unsupported):
        ProgramRunner(model, LIMITS, pool, load(), dtype=torch.bfloat16, threads=1)

    assert all(p.untyped_storage().nbytes() for p in model.parameters())


@pytest.mark.parametrize(
    ("page_size", "dtype", "why"),
    [(24, torch.bfloat16, "multiple of 16"), (16, torch.float16, "float16")],
)
def test_a_pool_refuses_what_has_no_kernel(page_size: int, dtype: torch.dtype, why: str) -> None:
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=32, num_pages=2, page_size=page_size)
    with pytest.raises(Unsupported, match=why):
        NativePool(shape, dtype)
