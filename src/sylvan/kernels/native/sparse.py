"""Traces latent attention to the tokens that an indexer selects.

Shapes: T rows, K chosen tokens.
"""

from __future__ import annotations

from sylvan.kernels.api import (
    AttentionLayer,
    IndexedRows,
    LatentParts,
    Rope,
    TracedTensor,
    Unsupported,
)
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.builder import ELEMENT_BYTES, ProgramBuilder
from sylvan.kernels.native.latent import trace_latent
from sylvan.kernels.native.opset import (
    IndexChoice,
    IndexScores,
    SparseAttention,
    TokenPages,
    TokenStore,
)
from sylvan.kernels.paged.cache import LayerPages

SCORES_MIB = 8  # memory for scores of a few rows, which threads compute together
_MAX_TOKENS = 250_000  # tokens whose scores fit into a thread's scratch memory


class SparseTracer:
    """Traces the sparse attention of all layers of a program."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self._builder = builder
        self._scores: int | None = None

    def trace(
        self,
        projected: tuple[TracedTensor, TracedTensor],
        parts: LatentParts,
        layer: AttentionLayer,
        pages: LayerPages,
        index: IndexedRows | TracedTensor,
    ) -> tuple[TracedTensor, TracedTensor]:
        """See `ops.sparse_latent_attention`."""
        own, builder = index if isinstance(index, IndexedRows) else None, self._builder
        chosen = builder.repeated(own.top_k, "i32", "tokens", 1) if own is not None else index
        assert isinstance(chosen, TracedTensor)
        if parts.query_scales is not None:
            raise Unsupported("scaled queries of sparse attention")
        if (rope := parts.rope) is None:
            raise Unsupported("sparse attention without rotary positions")
        places = self._pages(layer, pages)

        def attend(rows: TracedTensor) -> TracedTensor:
            self._store(rows, places, layer, own, rope)
            if own is not None:
                self._choose(rows, places, own, chosen)
            out = builder.new(layer.num_heads * layer.value_dim)
            op = SparseAttention(
                qkv=rows.id,
                pages=places,
                chosen=chosen.id,
                out=out.id,
                num_heads=layer.num_heads,
                value_dim=layer.value_dim,
                top_k=chosen.cols,
                scale=layer.scale,
            )
            builder.emit(op, out)
            return out

        return trace_latent(builder, projected, parts, attend), chosen

    def _pages(self, layer: AttentionLayer, pages: LayerPages) -> TokenPages:
        shape, builder = pages.shape, self._builder
        if not shape.tokens or shape.head_dim != layer.head_dim:
            raise Unsupported("sparse attention over pages without index keys")
        if max(layer.head_dim, shape.value_dim) > builder.constants.max_head:
            raise Unsupported(f"sparse attention over rows of {layer.head_dim} columns")
        if (layer.head_dim * _size(builder)) % 4 or (shape.value_dim * _size(builder)) % 4:
            raise Unsupported("sparse attention over an odd number of columns")
        latents, keys = pages.steps
        return TokenPages(
            latents=builder.graph.constant(pages.keys),
            keys=builder.graph.constant(pages.values),
            cols=layer.head_dim,
            key_cols=shape.value_dim,
            page_size=shape.page_size,
            table=pages.group,
            latent_step=latents,
            key_step=keys,
        )

    def _store(
        self,
        rows: TracedTensor,
        pages: TokenPages,
        layer: AttentionLayer,
        index: IndexedRows | None,
        rope: Rope,
    ) -> None:
        if len(rope.cos_sin) > _MAX_TOKENS:
            raise Unsupported(f"sparse attention over more than {_MAX_TOKENS} tokens")
        op = TokenStore(
            qkv=rows.id,
            pages=pages,
            q=None if index is None else index.q.id,
            k=None if index is None else index.k.id,
            cos_sin=self._builder.vector(rope.cos_sin),
            num_heads=layer.num_heads,
            value_dim=layer.value_dim,
            index_heads=0 if index is None else index.weights.cols,
            rotary_dim=rope.cos_sin.shape[1],
            interleaved=index is not None and index.interleaved,
        )
        self._builder.emit(op, rows)

    def _choose(
        self, rows: TracedTensor, pages: TokenPages, index: IndexedRows, chosen: TracedTensor
    ) -> None:
        heads = index.weights.cols
        if index.q.cols != heads * pages.key_cols or index.k.cols != pages.key_cols:
            raise Unsupported(f"{heads} indexer heads over {index.q.cols} columns")
        if index.weights.dtype != "f32":
            raise Unsupported("indexer weights that are not float32")
        if self._scores is None:
            self._scores = self._builder.graph.constant(allocate(SCORES_MIB << 20))
        for op in (IndexScores, IndexChoice):
            scores = op(
                pages=pages,
                q=index.q.id,
                weights=index.weights.id,
                scores=self._scores,
                chosen=chosen.id,
                index_heads=heads,
                top_k=index.top_k,
                scores_mib=SCORES_MIB,
            )
            self._builder.emit(scores, rows)


def _size(builder: ProgramBuilder) -> int:
    return ELEMENT_BYTES[builder.dtype]
