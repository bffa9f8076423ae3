"""Layers of two KV groups with page tables of their own, over every backend of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sylvan.runtime.attention
from sylvan.kernels.api import AttentionLayer
from sylvan.kernels.paged import reference
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.pool.mha import GroupShape, KVShape, MHAPool
from sylvan.utils import plugins

EAGER = [
    name
    for name in plugins.options(sylvan.runtime.attention)
    if "eager" in (caps := plugins.load(sylvan.runtime.attention, name).BACKEND.caps).runners
    and "cpu" in caps.devices
]
GRAPH_SAFE = [
    name
    for name in EAGER
    if plugins.load(sylvan.runtime.attention, name).BACKEND.caps.graph_capture
]
BACKENDS = [name for name in EAGER if name != "null"]
PAGE, N, K, H = 4, 6, 2, 16
SPECS = {
    "plain": {},
    "window": {"window": 5},
    "wide window": {"window": 1000},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 2, N)},
    "all": {"window": 7, "softcap": 2.0, "sinks": torch.linspace(-1, 2, N)},
    "bidirectional": {"causal": False},
}


def layer(**changes) -> AttentionLayer:
    fields = {"index": 1, "num_heads": N, "num_kv_heads": K, "head_dim": H, "scale": 0.3}
    return AttentionLayer(**fields | changes)


class Scene:
    """Requests with (computed before, new) tokens on shuffled pages, as one step.

    With `groups` layer 1 has pages of its own, and another page table than layer 0.
    """

    def __init__(
        self,
        backend: str,
        requests: list[tuple[int, int]],
        spec: AttentionLayer,
        kv_dtype: torch.dtype = torch.float32,
        groups: tuple[GroupShape, ...] = (),
    ) -> None:
        rng = np.random.default_rng(3)
        generator = torch.Generator().manual_seed(4)
        self.backend = plugins.load(sylvan.runtime.attention, backend).BACKEND()
        self.spec = spec
        shape = KVShape(
            num_layers=2,
            num_kv_heads=K,
            head_dim=H,
            num_pages=64,
            page_size=PAGE,
            groups=groups,
        )
        self.pool = MHAPool(shape, kv_dtype)
        group = self.pool.layer_groups[spec.index]
        pages = rng.permutation(np.arange(1, self.pool.groups[group].num_pages, dtype=np.int32))
        limits = BatchLimits(max_tokens=128, max_reqs=8, max_pages_per_req=16)
        self.batch = ForwardBatch(limits, self.pool, self.backend)
        host, row = self.batch.host, 0
        self.heads, self.whole = [], []
        for r, (before, new) in enumerate(requests):
            total, slot = before + new, 7 - r
            mine, pages = np.split(pages, [-(-total // PAGE)])
            host.page_tables[group, slot, : len(mine)] = mine
            at = np.arange(total)
            slots = mine[at // PAGE] * PAGE + at % PAGE
            q, k, v = (torch.randn(total, n, H, generator=generator) for n in (N, K, K))
            index = torch.from_numpy(slots[:before])
            self.pool.store(spec.index, index, k[:before], v[:before])
            host.slot_mappings[group, row : row + new] = slots[before:]
            host.kv_lens[r], host.req_slots[r], host.q_starts[r] = total, slot, row
            row += new
            self.heads.append((q[before:], k[before:], v[before:]))
            self.whole.append((q[before:], k, v))
        host.q_starts[len(requests)] = row
        self.batch.ready(row, len(requests), 0)

    def forget(self, window: int) -> None:
        """Make all numbers NaN but those of pages that the new rows see some token of."""
        host, group = self.batch.host, self.pool.layer_groups[self.spec.index]
        table, kept = host.page_tables[group], set()
        for r, slot in enumerate(host.req_slots[: self.batch.num_reqs]):
            new = host.q_starts[r + 1] - host.q_starts[r]
            first = max(0, host.kv_lens[r] - new - window + 1) // PAGE
            kept |= set(table[slot, first : -(-host.kv_lens[r] // PAGE)].tolist())
            table[slot, :first] = np.arange(first) % 2 * table[slot, 0]  # of no or of other use
        for index in range(2):
            for side in self.pool.layer(index):
                gone = [p for p in range(len(side)) if index != self.spec.index or p not in kept]
                side[gone] = torch.nan

    def run(self) -> torch.Tensor:
        self.backend.plan(self.batch)
        q, k, v = (torch.cat(parts) for parts in zip(*self.heads, strict=True))
        return self.backend.run(self.spec, q, k, v, self.batch)

    def expected(self) -> torch.Tensor:
        rows = [reference.attend(*heads, self.spec) for heads in self.whole]
        return torch.cat(rows).unflatten(1, (N, H))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_layers_read_the_page_table_of_their_group(backend, swapped):
    groups = GroupShape((0,), 64), GroupShape((1,), 30)
    requests = [(7, 1), (0, 5), (3, 6), (8, 8), (0, 1)]
    scene = Scene(backend, requests, layer(), groups=groups[::-1] if swapped else groups)

    assert scene.pool.layer_groups == ((1, 0) if swapped else (0, 1))
    torch.testing.assert_close(scene.run(), scene.expected(), rtol=1e-5, atol=1e-5)
    first = layer(index=0)
    heads = [torch.zeros(21, n, H) for n in (N, K, K)]
    scene.backend.run(first, *heads, scene.batch)  # whose page table says nothing: page 0
    torch.testing.assert_close(scene.run(), scene.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["window", "all"])
def test_pages_before_the_window_are_not_read(backend, spec):
    """They are somebody else's by then, and may hold what is no number."""
    groups = GroupShape((0,), 8), GroupShape((1,), 64)
    requests = [(31, 1), (0, 5), (23, 9), (40, 1), (2, 1)]
    scene = Scene(backend, requests, layer(**SPECS[spec]), groups=groups)

    scene.forget(SPECS[spec]["window"])

    torch.testing.assert_close(scene.run(), scene.expected(), rtol=1e-5, atol=1e-5)
