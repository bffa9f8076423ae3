"""Layers with a window in pages of their own, which are used again once the window has passed."""

from __future__ import annotations

import ctypes
from array import array

import msgspec
import numpy as np
import pytest
import torch

from sylvan.kernels.native.library import describe, load
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.attention.reference import ReferenceAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.executor.runner import EagerRunner
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.dummy import dummy_weights
from sylvan.runtime.models.groups import kv_groups
from sylvan.runtime.models.registry import load_family
from sylvan.runtime.pool.mha import GroupShape, KVShape, MHAPool
from sylvan.runtime.sampling.native import NativeSampler
from sylvan.runtime.sampling.params import SamplingSlots
from tests.unit.runtime.executor.graphs.test_program import PAGE, RAW, VOCAB

WINDOW, PAGES = 37, 40
LIMITS = BatchLimits(max_tokens=256, max_reqs=4, max_pages_per_req=20)
compiled = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")


def model_of(dtype: torch.dtype):
    family = load_family("Qwen3ForCausalLM")
    config = family.parse(RAW | {"num_hidden_layers": 3})
    config = msgspec.structs.replace(config, layer_windows=(WINDOW, None, WINDOW))
    model = family.model(config, Build(dtype=dtype, length=512))
    dummy_weights(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            parameter.data *= 4
    return config, model


def shape_of(config, windowed: int | None) -> KVShape:
    """With `windowed` pages for the layers with a window; None: all layers in one group."""
    groups = ()
    if windowed is not None:
        full, window = (group.layers for group in kv_groups(config))
        groups = GroupShape(full, PAGES), GroupShape(window, windowed)
    return KVShape(
        num_layers=3, num_kv_heads=2, head_dim=32, num_pages=PAGES, page_size=PAGE, groups=groups
    )


class Tables:
    """Gives requests pages as a manager does: those behind a window are taken back, and spoilt."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch
        counts = [group.num_pages for group in batch.kv.groups]
        self._free = [list(range(count - 1, 0, -1)) for count in counts]
        self.most = [0 for _ in counts]
        for group, count in enumerate(counts):
            for page in range(count):
                self._spoil(group, page)

    def _spoil(self, group: int, page: int) -> None:
        for region in self._batch.kv.groups[group].regions(page):
            ctypes.memset(region.address, 0xFF, region.num_bytes)

    def grow(self, slot: int, start: int, stop: int) -> None:
        """Room for tokens start .. stop of the request in `slot`, of which more come later."""
        tables = self._batch.host.page_tables
        for group, free in enumerate(self._free):
            if group:
                for entry in range(max(0, start - WINDOW + 1) // PAGE):
                    if page := int(tables[group, slot, entry]):
                        self._spoil(group, page)
                        tables[group, slot, entry] = 0
                        free.insert(0, page)
            for entry in range(-(-start // PAGE), -(-stop // PAGE)):
                tables[group, slot, entry] = free.pop()
            used = self._batch.kv.groups[group].num_pages - 1 - len(free)
            self.most[group] = max(self.most[group], used)


class Served:
    """A model over pages that are full of NaN before they are given to a request."""

    def __init__(self, dtype: torch.dtype, windowed: int | None, *, native: bool) -> None:
        config, model = model_of(dtype)
        shape = shape_of(config, windowed)
        if native:
            pool = NativePool(shape, dtype)
            self.runner = ProgramRunner(model, LIMITS, pool, load(), dtype=dtype, threads=2)
            self.batch = ForwardBatch(LIMITS, pool, NullAttention())
        else:
            pool = MHAPool(shape, dtype)
            self.runner = EagerRunner(model)
            self.batch = ForwardBatch(LIMITS, pool, ReferenceAttention())
        self.tables = Tables(self.batch)

    def step(self, work: dict[int, np.ndarray], starts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Logits of the last row of each request."""
        host, row, slots, places = self.batch.host, 0, [], []
        for i, (r, ids) in enumerate(work.items()):
            rows = slice(row, row + len(ids))
            positions = np.arange(starts[r], starts[r] + len(ids))
            self.tables.grow(r, starts[r], starts[r] + len(ids))
            host.input_ids[rows], host.positions[rows] = ids, positions
            host.kv_lens[i], host.req_slots[i] = positions[-1] + 1, r
            row += len(ids)
            host.q_starts[i + 1], host.sample_rows[i] = row, row - 1
            slots += [r] * len(ids)
            places += positions.tolist()
        host.map_slots(np.array(slots), np.array(places), PAGE)
        self.batch.ready(row, len(work), len(work))
        with torch.inference_mode():
            return dict(zip(work, self.runner.run(self.batch).clone(), strict=True))


def prompt(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, size).astype(np.int32)


def run(served: Served) -> list[torch.Tensor]:
    """Three requests in chunks, then decodes: far more tokens than the window has pages for."""
    prompts = {r: prompt(r, n) for r, n in ((0, 190), (1, 150), (2, 4))}
    done, found = dict.fromkeys(prompts, 0), []
    while todo := {r: ids[done[r] :][:45] for r, ids in prompts.items() if done[r] < len(ids)}:
        found += served.step(todo, done).values()
        for r, ids in todo.items():
            done[r] += len(ids)
    for _ in range(40):
        found += served.step({r: prompt(done[r], 1) for r in done}, done).values()
        done = {r: n + 1 for r, n in done.items()}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("native", [pytest.param(True, marks=compiled), False])
def test_a_window_of_few_pages_gives_the_same_bits(dtype, native):
    whole, windowed = (Served(dtype, pages, native=native) for pages in (None, 17))
    want, got = run(whole), run(windowed)

    assert all(torch.isfinite(x).all() for x in want)
    assert [torch.equal(x, y) for x, y in zip(got, want, strict=True)] == [True] * len(want)
    assert whole.tables.most == [30]
    assert windowed.tables.most[0] == 30
    assert windowed.tables.most[1] <= 16


@compiled
def test_a_fused_step_finds_the_slots_of_every_group():
    """The same tokens by the one native call, from the numbers of plans."""
    found = {}
    for windowed in (None, 17):
        served = Served(torch.float32, windowed, native=True)
        params = SamplingSlots(LIMITS.max_reqs, VOCAB)
        last_token = np.zeros(LIMITS.max_reqs, np.int32)
        for slot in (0, 2):
            request = GenerateRequest(
                rid=str(slot),
                input_ids=np.arange(5, dtype=np.int32),
                output_ids=np.empty(0, np.int32),
                sampling=SamplingParams(temperature=0.0),
            )
            params.join(slot, request, np.empty(0, np.int32))
        step = served.runner.fuse(served.batch, NativeSampler(load()), last_token, params)
        assert step is not None
        ids = prompt(0, 120).tolist()
        plans = [(([2, 0], [0, 0], [100, 120], [0, 1]), [*ids[:100], *ids], [])]
        plans += [
            (([2, 0], [100 + n, 120 + n], [101 + n, 121 + n], [0, 1]), [0, 0], [0, 1])
            for n in range(30)
        ]
        tokens = []
        for (slots, starts, stops, chosen), given, fed in plans:
            for slot, start, stop in zip(slots, starts, stops, strict=True):
                served.tables.grow(slot, start, stop)
            numbers = [*slots, *starts, *stops, *chosen, *fed, *(slots[row] for row in fed), *given]
            packed = np.frombuffer(array("i", numbers), np.int32)
            out = step.run(
                StepPlan(
                    num_slices=2,
                    num_tokens=len(given),
                    num_samples=2,
                    num_in_flight=len(fed),
                    numbers=packed,
                ),
                draw=True,
            )
            assert out is not None
            tokens.append(out.token_ids.tolist())
        found[windowed] = tokens

    assert found[17] == found[None]
    assert len({tuple(row) for row in found[None]}) > 10
