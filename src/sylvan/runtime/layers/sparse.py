"""Sparse latent attention: an indexer selects the tokens that a row attends to (DeepSeek V3.2).

The indexer's key (`wk`) follows the latent columns in the same page row, so that sharing, moving
and evicting pages includes it. A row with at most as many visible tokens as are selected attends to
all of them, exactly as without an indexer.

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
from sylvan.kernels.api import AttentionLayer, Rope, TracedTensor, Unsupported
from sylvan.kernels.latent import LatentParts
from sylvan.kernels.paged import reference
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import LayerNorm

_KEY_EPS = 1e-6
_MOST = 1 << 24  # approximate size of an intermediate tensor

Chosen = Sequence[torch.Tensor | None]
"""By request, the tokens (rows, K) of the rows that see more than K tokens; None if none do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexShape:
    """Sizes of an indexer; `interleaved`: pairs of rotary columns are adjacent."""

    heads: int
    columns: int
    top_k: int
    interleaved: bool = False


class Indexer(nn.Module):
    """Scores tokens for rows with a few small heads; unsharded on every rank."""

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
        q_THI = reference.rotate(q_THI, positions_T, self._rope(rope))
        weights_TH = self.weights_proj(x_TD).float() * (shape.heads * shape.columns) ** -0.5
        return q_THI, weights_TH

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
            raise ConfigError("config.json: an index needs q_lora_rank")
        self._index = shape
        self.indexer = Indexer(build, dim, self.q_rank, shape) if own else None

    def attend(
        self, x_TD: torch.Tensor, batch: ForwardBatch, given: Chosen | None
    ) -> tuple[torch.Tensor, Chosen | None]:
        """Output and selection; None: all rows see all tokens. Shape: (T, D) -> (T, D)."""
        if isinstance(x_TD, TracedTensor):
            raise Unsupported("attention to tokens that an indexer selects")
        assert self._rope is not None
        rope, positions_T = self._rope, batch.positions_T
        parts = LatentParts(
            self._shape, self.kv_b_proj.weight, self.kv_a_layernorm.of_heads(), rope
        )
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

    def _by_request(
        self,
        q_TNC: torch.Tensor,
        queries: tuple[torch.Tensor, torch.Tensor] | None,
        given: Chosen | None,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, Chosen]:
        """Attended latents (T, N, latent), and the selections of all requests."""
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
                    keys_SI = rows_PC[pages, :, 0, columns:].flatten(0, 1)[:length]
                    mine = queries[0][rows], queries[1][rows]
                    chosen = choose(*mine, keys_SI, first + few - starts[r], top_k)
                else:
                    assert given is not None
                    chosen = given[r]
                assert chosen is not None
                slots_TK = pages[chosen // size] * size + chosen % size
                out_TNC[rows] = attend_slots(q_TNC[rows], rows_PC, slots_TK, layer, latent)
            found.append(chosen)
        return out_TNC, found


def choose(
    q_THI: torch.Tensor, weights_TH: torch.Tensor, keys_SI: torch.Tensor, first: int, top_k: int
) -> torch.Tensor:
    """The best tokens of each row, up to its own position. Shape: int64 (T, K).

    Args:
        q_THI: Queries of the indexer; see `Indexer.queries`.
        weights_TH: Their weights.
        keys_SI: Index keys of all tokens.
        first: Position of the first row; it sees at least `top_k` tokens.
        top_k: K.
    """
    keys, chosen = keys_SI.float().T, list[torch.Tensor]()
    step = max(1, _MOST // (q_THI.shape[1] * len(keys_SI)))
    for start in range(0, len(q_THI), step):
        rows = slice(start, start + step)
        score_TS = torch.einsum("ths,th->ts", (q_THI[rows] @ keys).relu(), weights_TH[rows])
        own = first + start + torch.arange(len(score_TS), device=keys.device)[:, None]
        later = torch.arange(len(keys_SI), device=keys.device) > own
        chosen.append(score_TS.masked_fill(later, float("-inf")).topk(top_k, -1).indices)
    return torch.cat(chosen)


def attend_slots(
    q_TNC: torch.Tensor,
    rows_PS1C: torch.Tensor,
    slots_TK: torch.Tensor,
    layer: AttentionLayer,
    value_dim: int,
) -> torch.Tensor:
    """Attention of each row to the tokens in its slots, in float32. Shape: (T, N, value_dim)."""
    out = q_TNC.new_empty(*q_TNC.shape[:2], value_dim)
    kept, columns = rows_PS1C.flatten(0, 1)[:, 0], q_TNC.shape[-1]
    step = max(1, _MOST // (slots_TK.shape[1] * columns))
    for start in range(0, len(q_TNC), step):
        rows = slice(start, start + step)
        k_TKC = kept[slots_TK[rows], :columns].float()
        score_TNK = q_TNC[rows].float() @ k_TKC.transpose(1, 2) * layer.scale
        out[rows] = (score_TNK.softmax(-1) @ k_TKC[..., :value_dim]).to(out.dtype)
    return out
