"""Native attention called with tensors: as the definition says, and the same bits in company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope, Unsupported
from sylvan.kernels.native.attend import NativePagedAttention
from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.cache import PageShape, allocate_pages
from sylvan.runtime.attention.native import NativeTensorAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.rotary import rotated
from sylvan.runtime.pool.mha import KVShape

try:
    LIBRARY = load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

PAGE, N, K, H = 16, 6, 2, 24
LENGTHS = 40, 3, 290
SPECS = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 2, N)},
    "all": {"window": 7, "softcap": 2.0, "sinks": torch.linspace(-1, 2, N)},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def layer(**changes) -> AttentionLayer:
    fields = {"index": 1, "num_heads": N, "num_kv_heads": K, "head_dim": H, "scale": 0.3}
    return AttentionLayer(**fields | changes)


class Scene:
    """Requests of `LENGTHS` tokens on shuffled pages, computed in steps."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(4)
        shape = KVShape(num_layers=2, num_kv_heads=K, head_dim=H, num_pages=40, page_size=PAGE)
        pool = NativePool(shape, dtype)
        for side in (pool.layers[1].keys, pool.layers[1].values):
            side[:] = 255  # what an unwritten page holds must not matter: not a number
        self.backend = NativeTensorAttention(NativePagedAttention(LIBRARY, dtype, pool.layers))
        limits = BatchLimits(max_tokens=512, max_reqs=4, max_pages_per_req=20)
        self.batch = ForwardBatch(limits, pool, self.backend)
        pages = np.random.default_rng(3).permutation(np.arange(1, 40, dtype=np.int32))
        self.heads = []
        for r, length in enumerate(LENGTHS):
            mine, pages = np.split(pages, [-(-length // PAGE)])
            self.batch.host.page_table[3 - r, : len(mine)] = mine
            self.heads.append(
                [torch.randn(length, n, H, generator=generator).to(dtype) for n in (N, K, K)]
            )

    def step(self, spec: AttentionLayer, parts: dict[int, tuple[int, int]]) -> list[torch.Tensor]:
        """Compute tokens first .. last of some requests; what each of them gets."""
        host, row = self.batch.host, 0
        given: list[list[torch.Tensor]] = []
        for i, (r, (first, last)) in enumerate(parts.items()):
            at = np.arange(first, last)
            table = host.page_table[3 - r]
            host.out_slots[row : row + len(at)] = table[at // PAGE] * PAGE + at % PAGE
            host.kv_lens[i], host.req_slots[i], host.q_starts[i] = last, 3 - r, row
            given.append([x[first:last] for x in self.heads[r]])
            row += len(at)
        host.q_starts[len(parts)] = row
        self.batch.ready(row, len(parts), 0)
        self.backend.plan(self.batch)
        q, k, v = (torch.cat(some) for some in zip(*given, strict=True))
        out = self.backend.run(spec, q, k, v, self.batch)
        return list(out.split([last - first for first, last in parts.values()]))

    def expected(self, spec: AttentionLayer) -> list[torch.Tensor]:
        found = [reference.attend(*(x.float() for x in heads), spec) for heads in self.heads]
        return [x.unflatten(1, (N, H)) for x in found]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", SPECS)
def test_it_is_as_defined_and_the_same_bits_however_it_is_computed(spec, dtype):
    what = layer(**SPECS[spec])
    scene = Scene(dtype)
    together = scene.step(what, {r: (0, n) for r, n in enumerate(LENGTHS)})

    for found, expected in zip(together, scene.expected(what), strict=True):
        assert found.dtype == dtype
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(found.float(), expected, rtol=bound, atol=bound)

    alone = Scene(dtype)
    for r, length in enumerate(LENGTHS):
        (out,) = alone.step(what, {r: (0, length)})
        assert torch.equal(out, together[r])

    chunked = Scene(dtype)
    chunked.step(what, {r: (0, n - 2) for r, n in enumerate(LENGTHS)})
    for back in (2, 1):  # one token each: a decoding step
        last = chunked.step(what, {r: (n - back, n - back + 1) for r, n in enumerate(LENGTHS)})
        for out, whole in zip(last, together, strict=True):
            assert torch.equal(out[0], whole[-back])


@pytest.mark.parametrize("columns", [H, 8])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_heads_turn_by_their_rows_of_a_table(dtype, columns):
    scene, what = Scene(dtype), layer()
    scene.step(what, {r: (0, n) for r, n in enumerate(LENGTHS)})
    q, k, v = (torch.cat(some) for some in zip(*scene.heads, strict=True))
    angles = torch.randn(len(q), columns // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)

    found = scene.backend.run_rotated(what, q, k, v, scene.batch, table)

    heads = [rotated(x, table).to(dtype) for x in (q, k)]
    expected = scene.backend.run(what, *heads, v, scene.batch)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not torch.equal(scene.backend.run(what, q, k, v, scene.batch), expected)


@pytest.mark.parametrize("whole", [False, True], ids=["norms of heads", "norms of rows"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_a_projection_is_normed_turned_and_attended_in_one_call(dtype, interleaved, whole):
    scene, what = Scene(dtype), layer()
    scene.step(what, {r: (0, n) for r, n in enumerate(LENGTHS)})
    angles = torch.randn(max(LENGTHS), 4)
    rope = Rope(torch.cat((angles.cos(), angles.sin()), 1), interleaved)
    norms = tuple(HeadNorm(torch.randn(H * (n if whole else 1)), 1e-5) for n in (N, K))
    qkv = torch.cat([torch.cat(heads, 1).flatten(1) for heads in scene.heads])
    scene.batch.positions_T.copy_(torch.cat([torch.arange(n) for n in LENGTHS]))
    scene.backend.plan(scene.batch)

    for chosen in (norms, (None, norms[1]), (None, None)):
        for table in (rope, None):
            found = scene.backend.run_fused(what, qkv, table, chosen, scene.batch)
            again = scene.backend.run_fused(what, qkv, table, chosen, scene.batch)

            heads = reference.split_heads(qkv, what, scene.batch.positions_T, table, chosen)
            expected = scene.backend.run(what, *heads, scene.batch)
            bound = TOLERANCE[dtype]
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
            assert torch.equal(found, again)


def test_layers_do_not_mix_and_kinds_are_recorded_once():
    scene = Scene(torch.float32)
    first = scene.step(layer(), {0: (0, 40)})[0]
    other = scene.step(layer(index=0, window=9), {0: (0, 40)})[0]

    assert torch.equal(scene.step(layer(), {0: (0, 40)})[0], first)
    assert not torch.equal(first, other)


def test_heads_that_the_pages_do_not_have_are_refused():
    shape = PageShape(num_kv_heads=K, head_dim=H, value_dim=H, page_size=PAGE, dtype=torch.float32)
    attention = NativePagedAttention(
        LIBRARY, torch.float32, {0: allocate_pages(shape, 2).layers[0]}
    )

    attention.check(layer(index=0))
    with pytest.raises(Unsupported, match="another size than the KV pool"):
        attention.check(layer(index=0, head_dim=16))
    with pytest.raises(Unsupported, match="layer 1, which has no pages"):
        attention.check(layer(index=1))
    with pytest.raises(Unsupported, match="float16"):
        NativePagedAttention(LIBRARY, torch.float16, {})
