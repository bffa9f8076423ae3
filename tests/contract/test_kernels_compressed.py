"""Compressed attention in programs: what PyTorch computes, with the same bits however rows are cut.

Layers attend to a window of tokens, and to all entries or to those that an index chooses.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from sylvan.config.compressed import CompressedLayer
from sylvan.kernels import ops
from sylvan.kernels.api import Rope, Unsupported
from sylvan.kernels.native import compressed
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library, load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.core.states import StateWork
from sylvan.runtime.executor.graphs.arguments import run_arguments
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.partial import SymbolicBatch
from sylvan.runtime.executor.graphs.step_states import StepStates
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.compressed import CompressedKeyAttention, CompressedShape, KeptEntries
from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import GroupShape, KVShape
from sylvan.runtime.pool.states import TensorStates
from tests.support.native import DTYPES, native, random, variants

DIM, HEAD, PAGE, PAGES, LENGTH = 40, 32, 16, 140, 1040
EACH = LENGTH // PAGE  # pages of a request
LIMITS = BatchLimits(max_tokens=LENGTH, max_reqs=4, max_pages_per_req=EACH)


@dataclass(frozen=True)
class Case:
    """Entries of a layer, and how many of them a row reads."""

    entries: CompressedLayer | None
    top_k: int = 64


def entries(rate: int, index: int, block: int, column: int = 0) -> CompressedLayer:
    return CompressedLayer(
        rate=rate, width=HEAD, index=index, block=block, kv_layer=0, column=column
    )


CASES = {
    "a window": Case(None),
    "all entries": Case(entries(32, 0, 16)),
    "few entries": Case(entries(4, 16, 4, column=3)),
    "chosen entries": Case(entries(4, 16, 4), top_k=5),
    "entries of odd sizes": Case(entries(6, 10, 2), top_k=3),
}


@pytest.fixture(scope="module", params=variants())
def library(request: pytest.FixtureRequest) -> Library:
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


def layer_of(case: Case, dtype: torch.dtype) -> CompressedKeyAttention:
    shape = CompressedShape(
        heads=6,
        head_dim=HEAD,
        window=9,
        q_rank=24,
        groups=2,
        group_rank=20,
        index_heads=3,
        top_k=case.top_k,
        eps=1e-6,
    )
    angles = torch.arange(LENGTH)[:, None] * 50.0 ** (-torch.arange(0, 8, 2) / 8)
    rope = Rope(torch.cat((angles.cos(), angles.sin()), 1), interleaved=True)
    kept = None if case.entries is None else KeptEntries(layer=case.entries, pool=1, part=0)
    layer = CompressedKeyAttention(Build(dtype=dtype, length=LENGTH), DIM, shape, rope, 0, kept)
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        drawn = random(*parameter.shape, dtype=torch.float32, seed=number)
        wide = parameter.dim() == 2 and not name.endswith("ape")
        scale = parameter.shape[1] ** -0.5 if wide else 0.5
        parameter.data.copy_(drawn * scale + name.endswith("norm.weight"))
    return layer


class Layer:
    """A layer with pages of two groups and states, as steps drive it; `library` None: PyTorch."""

    def __init__(self, case: Case, dtype: torch.dtype, library: Library | None = None) -> None:
        self.layer, kept = layer_of(case, dtype), case.entries
        columns = kept.columns + kept.column if kept else 8
        groups = GroupShape((1,), PAGES, columns), GroupShape((0,), PAGES)
        shape = KVShape(
            num_layers=2,
            num_kv_heads=1,
            head_dim=HEAD,
            num_pages=PAGES,
            page_size=PAGE,
            groups=groups,
        )
        parts = kept.state if kept else ((1,),)
        self.states = TensorStates([(part, torch.float32) for part in parts], 8)
        self.program: Program | None = None
        if library is None:
            pool = LatentPool(shape, HEAD, dtype)
        else:
            pool = NativePool(shape, dtype, latent=HEAD, rows=True)
            self._trace(pool, dtype, library)
        self.batch = ForwardBatch(LIMITS, pool, NullAttention(), states=self.states)
        for number, group in enumerate(pool.groups):
            order = np.random.default_rng(number).permutation(PAGES - 1) + 1
            self.batch.host.page_tables[number, :2] = order[: 2 * EACH].reshape(2, EACH)
            for page in range(PAGES if self.program else 0):
                for region in group.regions(page):
                    ctypes.memset(region.address, 0xFF, region.num_bytes)
        self.arrays, self.arguments = StepStates(LIMITS), run_arguments(self.batch.host)

    def _trace(self, pool: NativePool, dtype: torch.dtype, library: Library) -> None:
        limits = ProgramLimits(max_tokens=LIMITS.max_tokens, max_outputs=4)
        states = self.states.parts
        tracer = NativeTracer(dtype, limits, pool.layers, library.constants, states=states)
        self.x = tracer.input(DIM, tracer.dtype)
        with torch.inference_mode():
            self.out = self.layer(self.x, SymbolicBatch(tracer))
        tracer.pin(self.out)
        self.program = Program(library, compile_graph(tracer.graph))

    def step(
        self,
        rows: dict[int, tuple[int, torch.Tensor]],
        saves: tuple[tuple[int, int, int], ...] = (),
    ) -> torch.Tensor:
        """Rows of requests 0 and 1, from a position on; their states are in slots 1 and 2."""
        host, count, slots, places = self.batch.host, 0, [], []
        for i, (request, (start, x_TD)) in enumerate(rows.items()):
            places += range(start, start + len(x_TD))
            slots += [request] * len(x_TD)
            count += len(x_TD)
            host.kv_lens[i], host.req_slots[i] = start + len(x_TD), request
            host.q_starts[i + 1] = count
        host.positions[:count] = places
        host.map_slots(np.array(slots), np.array(places), PAGE)
        self.batch.ready(count, len(rows), 0)
        work = StateWork(np.array([1 + r for r in rows], np.int32), (), saves)
        self.batch.state_work = work
        x_TD = torch.cat([x for _, x in rows.values()])
        if self.program is None:
            with torch.inference_mode():
                return self.layer(x_TD, self.batch)
        step = self.arguments
        step.tokens, step.seqs = count, len(rows)
        self.arrays.bind(step, work)
        self.program.write(self.x, x_TD)
        self.program.run(step)
        return self.program.read(self.out, count).clone()


def prompt(rows: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    return random(rows, DIM, dtype=dtype, seed=seed)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    bound = float(want.float().abs().max()) * (2**-5 if dtype == torch.bfloat16 else 3e-5)
    assert float((got.float() - want.float()).abs().max()) < bound


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CASES),
        *((name, torch.bfloat16) for name in ("a window", "all entries", "few entries")),
    ],
)
def test_it_computes_what_pytorch_does(name: str, dtype: torch.dtype, library: Library) -> None:
    """Where rows choose, rounding to bfloat16 would choose otherwise."""
    mine, its = Layer(CASES[name], dtype, library), Layer(CASES[name], dtype)
    first = {0: (0, prompt(101, dtype)), 1: (0, prompt(30, dtype, 8))}
    second = {1: (30, prompt(40, dtype, 9)), 0: (101, prompt(1, dtype, 10))}

    for rows, saves in ((first, ((0, 70, 4),)), (second, ())):
        assert_near(mine.step(rows, saves), its.step(rows, saves), dtype)

    if CASES[name].entries is not None:
        for part, other in zip(mine.states.parts, its.states.parts, strict=True):
            for slot in (1, 2, 4):
                assert torch.allclose(part[slot], other[slot], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_cuts_and_company(
    name: str, dtype: torch.dtype, library: Library
) -> None:
    x_TD, other = prompt(120, dtype), prompt(50, dtype, 8)
    whole, cut = Layer(CASES[name], dtype, library), Layer(CASES[name], dtype, library)
    want = whole.step({0: (0, x_TD)})

    ends = [7, 50, 53, *range(100, 121)]
    found = [cut.step({0: (0, x_TD[:7])})]
    found.append(cut.step({1: (0, other[:20]), 0: (7, x_TD[7:50])})[20:])
    for start, stop in pairwise(ends[1:]):
        found.append(cut.step({0: (start, x_TD[start:stop])}))

    assert torch.equal(torch.cat(found), want)


def test_bits_do_not_depend_on_room_for_scores(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, x_TD = CASES["chosen entries"], prompt(LENGTH, torch.float32)
    want = Layer(case, torch.float32, library).step({0: (0, x_TD)})

    monkeypatch.setattr(compressed, "SCORES_MIB", 1)
    assert LENGTH * (LENGTH // 4) * 4 > 1 << 20

    assert torch.equal(Layer(case, torch.float32, library).step({0: (0, x_TD)}), want)


@pytest.mark.parametrize("sizes", [(3, 32, 64), (2, 40, 24)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_columns_have_matrices_of_their_own(
    sizes: tuple[int, int, int], dtype: torch.dtype, library: Library
) -> None:
    groups, inputs, outputs = sizes
    x = random(70, groups * inputs, dtype=dtype)
    weight = random(groups * outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5)
    want = ops.grouped_linear(x, weight, groups)

    got = native(library, dtype, lambda _, x: ops.grouped_linear(x, weight, groups), [x])

    assert_near(got, want, dtype)


def test_pages_of_keys_in_kernel_order_are_refused(library: Library) -> None:
    case = CASES["a window"]
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=HEAD, num_pages=4, page_size=PAGE)
    pool = NativePool(shape, torch.float32, latent=HEAD)
    limits = ProgramLimits(max_tokens=8, max_outputs=1)
    tracer = NativeTracer(torch.float32, limits, pool.layers, library.constants)
    layer = layer_of(case, torch.float32)

    with pytest.raises(Unsupported, match="pages without a row for each token"):
        layer(tracer.input(DIM, "f32"), SymbolicBatch(tracer))
