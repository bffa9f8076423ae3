"""Attention to a window of tokens and to compressed entries of several tokens (DeepSeek V4).

A token has one vector that is both key and value, so outputs are rotated back. Heads are projected
to the hidden size in groups. In a layer with an indexer, rows attend to the best-scored entries.

Shapes: T rows, D hidden, N heads, H columns of a head, S tokens of a window, E entries, K selected
ones, J heads of the index, I their columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from sylvan.config.compressed import CompressedLayer
from sylvan.kernels import ops
from sylvan.kernels.api import LinearWeight, Rope, TracedTensor, X
from sylvan.kernels.compressed import (
    CompressedHeads,
    EntryIndex,
    EntryPlace,
    TracedEntries,
    reference,
)
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.compress import Compressor, fragments
from sylvan.runtime.layers.linear import ColumnParallel, Linear, RowParallel
from sylvan.runtime.layers.mesh import Split
from sylvan.runtime.layers.norm import RMSNorm

_MAX_NUMBERS = 1 << 24  # approximate limit of an intermediate tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedShape:
    """Sizes of attention of one layer.

    Attributes:
        heads: N.
        head_dim: H.
        window: Tokens whose keys a row reads, its own included.
        q_rank: Columns of the latent vector of queries.
        groups: Groups of heads whose outputs are projected together.
        group_rank: Columns of the projection of a group.
        index_heads: J.
        top_k: K.
        eps: Epsilon of all norms.
    """

    heads: int
    head_dim: int
    window: int
    q_rank: int
    groups: int
    group_rank: int
    index_heads: int
    top_k: int
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptEntries:
    """Where a layer keeps entries: their layout, the layer of the pool, the first state part."""

    layer: CompressedLayer
    pool: int
    part: int


@dataclass(frozen=True, slots=True)
class _Pages:
    """Page table of one request in a layer of the pool."""

    rows_PS1C: torch.Tensor
    table_P: torch.Tensor

    def read(self, positions: torch.Tensor) -> torch.Tensor:
        """Columns of tokens, float32. Shape: (..., C)."""
        size = self.rows_PS1C.shape[1]
        return self.rows_PS1C[self.table_P[positions // size], positions % size, 0].float()


class EntryIndexer(nn.Module):
    """Scores entries for rows with a few small heads; the same on every rank."""

    def __init__(
        self, build: Build, dim: int, shape: CompressedShape, layer: CompressedLayer, part: int
    ) -> None:
        super().__init__()
        self._heads, self._top_k = shape.index_heads, shape.top_k
        self.wq_b = Linear(build, shape.q_rank, (shape.index_heads * layer.index,), bias=False)
        self.weights_proj = Linear(build, dim, (shape.index_heads,), bias=False)
        state = layer.state[1]
        self.compressor = Compressor(build, dim, layer.rate, state, part, shape.eps)

    def queries(
        self, x_TD: torch.Tensor, latent_TQ: torch.Tensor, positions_T: torch.Tensor, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and weights of heads. Shapes: float32 (T, J, I), (T, J)."""
        q_TJI = self.wq_b(latent_TQ).float().unflatten(-1, (self._heads, -1))
        return reference.rotate_columns(q_TJI, positions_T, rope), self.weights_proj(
            x_TD, out_f32=True
        )

    def traced(self, x: TracedTensor, latent: TracedTensor) -> EntryIndex:
        """The same as traced tensors, with the rows of which the keys of entries are sums."""
        return EntryIndex(
            keys=self.compressor.traced(x),
            q=self.wq_b(latent),
            weights=self.weights_proj(x, out_f32=True),
            top_k=self._top_k,
        )


class GroupedLinear(nn.Module):
    """A linear layer per group of columns. Shape: (T, G F) -> (T, G R)."""

    weight: LinearWeight

    def __init__(self, build: Build, inputs: int, outputs: Split) -> None:
        super().__init__()
        self.weight = build.empty(outputs, inputs)
        self._groups = 1

    def divide(self, groups: int) -> None:
        """Set the number of groups of this rank."""
        self._groups = groups

    def forward(self, x_TC: X) -> X:
        """Shape: (T, G F) -> (T, G R)."""
        return ops.grouped_linear(x_TC, self.weight, self._groups)


class CompressedKeyAttention(nn.Module):
    """Attention of one layer. `keys`: layer of the pool that holds the keys of tokens."""

    def __init__(
        self,
        build: Build,
        dim: int,
        shape: CompressedShape,
        rope: Rope,
        keys: int,
        kept: KeptEntries | None,
    ) -> None:
        super().__init__()
        self._shape, self._rope, self._keys = shape, rope, keys
        self._entries = None if kept is None else kept.layer
        self._pool = keys if kept is None else kept.pool
        groups = build.mesh.share(shape.groups, "o_groups")
        heads = build.mesh.query_heads(shape.heads)
        self.wq_a = Linear(build, dim, (shape.q_rank,), bias=False)
        self.q_norm = RMSNorm(build, shape.q_rank, shape.eps)
        self.wq_b = ColumnParallel(build, shape.q_rank, Split(heads.times(shape.head_dim)))
        self.wkv = Linear(build, dim, (shape.head_dim,), bias=False)
        self.kv_norm = RMSNorm(build, shape.head_dim, shape.eps)
        self.attn_sink = build.empty(Split(heads))
        inputs, outputs = (
            shape.heads * shape.head_dim // shape.groups,
            groups.times(shape.group_rank),
        )
        self.wo_a = GroupedLinear(build, inputs, Split(outputs))
        self.wo_a.divide(groups.size)
        self.wo_b = RowParallel(build, outputs, dim)
        self.compressor = self.indexer = None
        if kept is not None:
            rate, state = kept.layer.rate, kept.layer.state[0]
            self.compressor = Compressor(build, dim, rate, state, kept.part, shape.eps)
            if kept.layer.index:
                self.indexer = EntryIndexer(build, dim, shape, kept.layer, kept.part + 1)

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        """Shape: (T, D) -> (T, D), the same on every rank."""
        if isinstance(x_TD, TracedTensor):
            return self.wo_b(self.wo_a(self._traced(x_TD)))
        return self.wo_b(self.wo_a(self._computed(cast("torch.Tensor", x_TD), batch)))

    def _traced(self, x: TracedTensor) -> TracedTensor:
        """Heads after attention, in a traced program. Shape: (T, N H)."""
        shape, kept, far = self._shape, self._entries, None
        latent = self.q_norm(self.wq_a(x))[0]
        if kept is not None:
            assert self.compressor is not None
            index = None if self.indexer is None else self.indexer.traced(x, latent)
            place = EntryPlace(
                layer=self._pool, rate=kept.rate, block=kept.block, column=kept.column
            )
            far = TracedEntries(place=place, rows=self.compressor.traced(x), index=index)
        q = self.wq_b(latent)
        heads = CompressedHeads(
            layer=self._keys,
            num_heads=q.cols // shape.head_dim,
            head_dim=shape.head_dim,
            window=shape.window,
            sinks=self.attn_sink,
            rope=self._rope,
            eps=shape.eps,
        )
        return ops.compressed_attention(q, self.kv_norm(self.wkv(x))[0], heads, far)

    def _computed(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Heads after attention. Shape: (T, N H)."""
        shape, positions_T = self._shape, batch.positions_T
        latent_TQ = self.q_norm(self.wq_a(x_TD))[0]
        q_TNH = self.wq_b(latent_TQ).float().unflatten(-1, (-1, shape.head_dim))
        q_TNH = reference.rotate_columns(
            reference.unit_heads(q_TNH, shape.eps), positions_T, self._rope
        )
        k_T1H = self.kv_norm(self.wkv(x_TD))[0].float()[:, None]
        k_T1H = reference.rotate_columns(k_T1H, positions_T, self._rope).to(x_TD.dtype)
        batch.kv.store(self._keys, batch.slots_of(self._keys), k_T1H, k_T1H)
        if self._entries is not None:
            self._store_entries(x_TD, batch, self._entries)
        asking = None
        if self.indexer is not None:
            asking = self.indexer.queries(x_TD, latent_TQ, positions_T, self._rope)
        out_TNH = self._attended(q_TNH, asking, batch)
        out_TNH = reference.rotate_columns(out_TNH, positions_T, self._rope, inverse=True)
        return out_TNH.to(x_TD.dtype).flatten(1)

    def _store_entries(
        self, x_TD: torch.Tensor, batch: ForwardBatch, layer: CompressedLayer
    ) -> None:
        """Write the entries that this step completes into the slots of their last tokens."""
        assert self.compressor is not None
        cut = fragments(batch, layer.rate)
        made = [self.compressor(x_TD, batch, cut, self._rope)]
        if self.indexer is not None:
            made.append(self.indexer.compressor(x_TD, batch, cut, self._rope))
        if not len(cut.done):
            return
        positions_EB = _spread(cut.entry_F[cut.done], layer)
        slots_E = batch.req_slots_R[cut.request_F[cut.done]].long()
        size, table = batch.kv.page_size, batch.table_of(self._pool)
        rows_PS1C = batch.kv.layer(self._pool)[0]
        pages_EB = table[slots_E[:, None], positions_EB // size].long()
        parts = [entry.unflatten(-1, (layer.block, -1)) for entry in made]
        here = slice(layer.column, layer.column + layer.columns)
        rows_PS1C[pages_EB, positions_EB % size, 0, here] = torch.cat(parts, -1).to(rows_PS1C.dtype)

    def _attended(
        self,
        q_TNH: torch.Tensor,
        asking: tuple[torch.Tensor, torch.Tensor] | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        out_TNH, starts = torch.empty_like(q_TNH), batch.q_starts_R.tolist()
        keys, pool = batch.kv.layer(self._keys)[0], batch.kv.layer(self._pool)[0]
        reqs = zip(batch.req_slots_R.tolist(), batch.kv_lens_R.tolist(), strict=True)
        for r, (slot, length) in enumerate(reqs):
            near = _Pages(keys, batch.table_of(self._keys)[slot].long())
            far = _Pages(pool, batch.table_of(self._pool)[slot].long())
            for rows in self._steps(starts[r], starts[r + 1], length):
                mine = None if asking is None else (asking[0][rows], asking[1][rows])
                first = length - starts[r + 1] + rows.start
                out_TNH[rows] = self._of_rows(q_TNH[rows], mine, first, near, far)
        return out_TNH

    def _steps(self, start: int, end: int, length: int) -> list[slice]:
        """Divide rows so that scores and selected entries stay small."""
        shape, count = self._shape, 0
        if self._entries is not None:
            count = length // self._entries.rate
        numbers = max(shape.heads, shape.index_heads) * (shape.window + count)
        if count > shape.top_k:
            numbers = max(numbers, shape.top_k * shape.head_dim)
        step = max(1, min(shape.window, _MAX_NUMBERS // numbers))
        return [slice(at, min(at + step, end)) for at in range(start, end, step)]

    def _of_rows(
        self,
        q_TNH: torch.Tensor,
        asking: tuple[torch.Tensor, torch.Tensor] | None,
        first: int,
        near: _Pages,
        far: _Pages,
    ) -> torch.Tensor:
        """Attend for rows of one request, from position `first` on. Shape: float32 (T, N, H)."""
        shape, device = self._shape, q_TNH.device
        own_T1 = first + torch.arange(len(q_TNH), device=device)[:, None]
        seen_S = torch.arange(max(0, first - shape.window + 1), first + len(q_TNH), device=device)
        key_SH = near.read(seen_S)
        hidden_TS = (seen_S > own_T1) | (seen_S <= own_T1 - shape.window)
        far_keys = None
        if self._entries is not None:
            chosen_TK, hidden_TK = self._chosen(asking, own_T1, far, self._entries)
            far_keys = self._read(far, chosen_TK, self._entries), hidden_TK
        return reference.attend(q_TNH, (key_SH, hidden_TS), far_keys, self.attn_sink)

    def _chosen(
        self,
        asking: tuple[torch.Tensor, torch.Tensor] | None,
        own_T1: torch.Tensor,
        far: _Pages,
        layer: CompressedLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select entries for each row, and mask those not complete. Shapes: (T or 1, K), (T, K)."""
        complete_T1 = (own_T1 + 1) // layer.rate
        every_1E = torch.arange(int(complete_T1.max()), device=own_T1.device)[None]
        hidden_TE = every_1E >= complete_T1
        if asking is None or every_1E.shape[1] <= self._shape.top_k:
            return every_1E, hidden_TE
        q_TJI, weight_TJ = asking
        key_EI = self._read(far, every_1E, layer, index=True)[0]
        given = q_TJI, weight_TJ, key_EI, hidden_TE, self._shape.top_k
        chosen_TK = reference.choose_entries(*given)
        return chosen_TK, chosen_TK >= complete_T1

    def _read(
        self, far: _Pages, entry_TK: torch.Tensor, layer: CompressedLayer, *, index: bool = False
    ) -> torch.Tensor:
        """Read the keys of entries, or their index keys. Shape: (..., K, H or I)."""
        columns_TKBC = far.read(_spread(entry_TK, layer))
        width = layer.width // layer.block
        first = layer.column + (width if index else 0)
        last = layer.column + (layer.columns if index else width)
        return columns_TKBC[..., first:last].flatten(-2)


def _spread(entry_E: torch.Tensor, layer: CompressedLayer) -> torch.Tensor:
    """Positions of the tokens that hold an entry. Shape: (..., block)."""
    last = torch.arange(layer.rate - layer.block, layer.rate, device=entry_E.device)
    return entry_E[..., None] * layer.rate + last
