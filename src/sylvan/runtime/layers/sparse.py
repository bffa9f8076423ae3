"""Sparse latent attention: an indexer selects the tokens that a row attends to (DeepSeek V3.2).

The indexer's key (`wk`) is stored with the latent columns in the same page, so it is shared, moved
and evicted together with them. A row that sees at most `top_k` tokens attends to all of them,
exactly as without an indexer.

Source: DeepSeek-V3.2-Exp's technical report. Its Hadamard transform and its 8-bit scores only
affect speed, and are omitted.

Shapes: T rows, D hidden, N heads, C latent and rotary columns, H heads of the indexer, I their
columns, S tokens of a request, K selected tokens, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from sylvan.kernels import ops
from sylvan.kernels.api import IndexedRows, Rope, TracedTensor
from sylvan.kernels.latent import LatentParts
from sylvan.kernels.paged import reference
from sylvan.kernels.sparse import attend_slots, choose_tokens
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import LayerNorm

_KEY_EPS = 1e-6

Chosen = Sequence[torch.Tensor | None]
"""By request, the tokens (rows, K) of the rows that see more than K tokens; None if none do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexShape:
    """Sizes of an indexer; `interleaved`: the two columns of a rotary pair are adjacent."""

    heads: int
    columns: int
    top_k: int
    interleaved: bool = False


class Indexer(nn.Module):
    """Scores tokens for each row, with a few small heads; unsharded on every rank."""

    def __init__(self, build: Build, dim: int, q_rank: int, shape: IndexShape) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = Linear(build, q_rank, (shape.heads * shape.columns,), bias=False)
        self.wk = Linear(build, dim, (shape.columns,), bias=False)
        self.k_norm = LayerNorm(build, shape.columns, _KEY_EPS)
        self.weights_proj = Linear(build, dim, (shape.heads,), bias=False)

    def keys(self, x_TD: torch.Tensor, positions_T: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Index key of each row. Shape: (T, 1, I)."""
        k_T1I = self.k_norm(self.wk(x_TD))[0].float()[:, None]
        return reference.rotate(k_T1I, positions_T, self._rope(rope)).to(x_TD.dtype)

    def queries(
        self, x_TD: torch.Tensor, latent_TQ: torch.Tensor, positions_T: torch.Tensor, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and head weights. Shapes: float32 (T, H, I), (T, H)."""
        shape = self.shape
        q_THI = self.wq_b(latent_TQ).float().unflatten(-1, (shape.heads, -1))
        q_THI = reference.rotate(q_THI, positions_T, self._rope(rope)).to(x_TD.dtype).float()
        weights_TH = self.weights_proj(x_TD, out_f32=True)
        return q_THI, weights_TH

    def traced(self, x: TracedTensor, latent: TracedTensor) -> IndexedRows:
        """Keys, queries and weights as traced tensors; rotated only when keys are stored."""
        return IndexedRows(
            q=self.wq_b(latent),
            k=self.k_norm(self.wk(x))[0],
            weights=self.weights_proj(x, out_f32=True),
            top_k=self.shape.top_k,
            interleaved=self.shape.interleaved,
        )

    def _rope(self, rope: Rope) -> Rope:
        return replace(rope, interleaved=self.shape.interleaved)


class SparseLatentAttention(LatentAttention):
    """Latent attention to the tokens that an indexer selects.

    A layer without an `indexer` reuses the selection of the layer before it.
    """

    def index_by(self, build: Build, dim: int, shape: IndexShape, *, own: bool) -> None:
        """Add an indexer; `own`: this layer selects tokens itself.

        Raises:
            ConfigError: the queries have no latent vector to read.
        """
        if self.q_rank is None:
            raise ConfigError("config.json: an indexer (index_topk) needs q_lora_rank")
        self._index = shape
        self.indexer = Indexer(build, dim, self.q_rank, shape) if own else None

    def attend(
        self, x_TD: torch.Tensor, batch: ForwardBatch, given: Chosen | None
    ) -> tuple[torch.Tensor, Chosen | None]:
        """Return output and selection (None: all rows see all tokens). Shape: (T, D) -> (T, D)."""
        assert self._rope is not None
        rope, positions_T, parts = self._rope, batch.positions_T, self._parts()
        latent_TQ = self.q_a_layernorm(self.q_a_proj(x_TD))[0]
        q_TNC, k_T1C = ops.latent_heads(
            self.q_b_proj(latent_TQ), self.kv_a_proj_with_mqa(x_TD), parts, positions_T
        )
        index, columns = self.indexer, self._index.columns
        own = k_T1C.new_zeros(len(k_T1C), 1, columns)
        if index is not None:
            own = index.keys(x_TD, positions_T, rope)
        row_T1C = torch.cat((k_T1C, own), -1)
        value_T1C = row_T1C[..., : self._shape.latent]
        if int(batch.kv_lens_R.max()) <= self._index.top_k:
            wide = replace(self._layer, head_dim=row_T1C.shape[-1])
            padded = functional.pad(q_TNC, (0, columns))
            out = batch.attention.run(wide, padded, row_T1C, value_T1C, batch)
            return self.o_proj(ops.latent_output(out, parts)), None
        batch.kv.store(self._layer.index, batch.slots_of(self._layer.index), row_T1C, value_T1C)
        queries = None
        if index is not None:
            queries = index.queries(x_TD, latent_TQ, positions_T, rope)
        out, chosen = self._by_request(q_TNC, queries, given, batch)
        return self.o_proj(ops.latent_output(out, parts)), chosen

    def traced(
        self, x: TracedTensor, given: TracedTensor | None
    ) -> tuple[TracedTensor, TracedTensor]:
        """`forward` as ops of a traced program; the selection covers all rows."""
        latent = self.q_a_layernorm(self.q_a_proj(x))[0]
        q, kv = self.q_b_proj(latent), self.kv_a_proj_with_mqa(x)
        index = given if self.indexer is None else self.indexer.traced(x, latent)
        assert index is not None
        out, chosen = ops.sparse_latent_attention(q, kv, self._parts(), self._layer, index)
        return self.o_proj(out), chosen

    def _parts(self) -> LatentParts:
        assert self._rope is not None
        norm = self.kv_a_layernorm.of_heads()
        return LatentParts(self._shape, self.kv_b_proj.weight, norm, self._rope, self._scales)

    def _by_request(
        self,
        q_TNC: torch.Tensor,
        queries: tuple[torch.Tensor, torch.Tensor] | None,
        given: Chosen | None,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, Chosen]:
        """Return attention results (T, N, latent), and the selections of all requests."""
        layer, latent, top_k = self._layer, self._shape.latent, self._index.top_k
        rows_PC, columns = batch.kv.layer(layer.index)[0], q_TNC.shape[-1]
        table_SP, size = batch.table_of(layer.index), batch.kv.page_size
        out_TNC = q_TNC.new_empty(*q_TNC.shape[:2], latent)
        starts = batch.q_starts_R.tolist()
        found: list[torch.Tensor | None] = []
        reqs = zip(batch.req_slots_R.tolist(), batch.kv_lens_R.tolist(), strict=True)
        for r, (slot, length) in enumerate(reqs):
            first = length - (starts[r + 1] - starts[r])
            pages = table_SP[slot, : -(-length // size)].long()
            few = starts[r] + max(0, min(top_k, length) - first)  # earlier rows see all tokens
            if few > starts[r]:
                seen = first + few - starts[r]
                k_S1C = rows_PC[pages[: -(-seen // size)], ..., :columns].flatten(0, 1)[:seen]
                k_S1C = k_S1C.to(q_TNC.dtype)
                dense = reference.attend(q_TNC[starts[r] : few], k_S1C, k_S1C[..., :latent], layer)
                out_TNC[starts[r] : few] = dense.unflatten(1, (-1, latent))
            rows, chosen = slice(few, starts[r + 1]), None
            if few < starts[r + 1]:
                if queries is not None:
                    mine = queries[0][rows], queries[1][rows]
                    chosen = choose_tokens(*mine, rows_PC, pages, length, top_k)
                else:
                    assert given is not None
                    chosen = given[r]
                assert chosen is not None
                slots_TK = pages[chosen // size] * size + chosen % size
                out_TNC[rows] = attend_slots(q_TNC[rows], rows_PC, slots_TK, layer, latent)
            found.append(chosen)
        return out_TNC, found
