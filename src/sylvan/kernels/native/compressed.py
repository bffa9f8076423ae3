"""Traces compressed attention: store of keys and entries, choice of entries, attention.

Shapes: T rows, K entries that are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.compressed.parts import (
    CompressedHeads,
    EntryIndex,
    EntryInputs,
    EntryPlace,
    TracedEntries,
)
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.builder import ProgramBuilder, padded
from sylvan.kernels.native.opset import (
    CompressedAttention,
    EntryChoice,
    EntryRows,
    EntryScan,
    EntryScores,
    EntryStore,
    KeyStore,
    TokenRows,
    TurnHeads,
)
from sylvan.kernels.paged.cache import LayerPages

SCORES_MIB = 8  # memory for scores of a few rows, which threads compute together
MAX_INDEX, MAX_ENTRIES = 256, 200_000  # see MAX_INDEX and MAX_ENTRIES

StateOf = Callable[[int, tuple[int, ...]], int]
"""All slots of a float32 state of a shape, by its number."""


class EntryTracer:
    """Traces the compressed attention of all layers of a program."""

    def __init__(
        self, builder: ProgramBuilder, pages: Mapping[int, LayerPages], state_of: StateOf
    ) -> None:
        self._builder, self._pages, self._state_of = builder, pages, state_of
        self._scores: int | None = None

    def trace(
        self, q: TracedTensor, k: TracedTensor, heads: CompressedHeads, far: TracedEntries | None
    ) -> TracedTensor:
        """See `ops.compressed_attention`."""
        builder, table = self._builder, heads.rope.cos_sin
        for x in (q, k):
            builder.expect(x, "compressed attention")
        self._check(heads, far)
        cos_sin, rotary_dim = builder.vector(table), table.shape[1]
        near = self._tokens(heads.layer, heads.head_dim)
        self._rotate(q, heads, heads.num_heads, norm=True)
        store = KeyStore(x=k.id, cos_sin=cos_sin, tokens=near, cols=k.cols, rotary_dim=rotary_dim)
        builder.emit(store, k)
        entries, chosen = EntryRows(tokens=near, rate=0, block=1, column=0, width=1), None
        if far is not None:
            entries = self._place(far.place, far.rows.width)
            self._store(far.rows, entries, heads)
            if far.index is not None:
                chosen = self._choose(far.index, far.place, heads, far.rows.width)
        out = builder.new(q.cols, None, q)
        op = CompressedAttention(
            q=q.id,
            tokens=near,
            entries=entries,
            chosen=None if chosen is None else chosen.id,
            sinks=builder.vector(heads.sinks),
            cos_sin=cos_sin,
            out=out.id,
            num_heads=heads.num_heads,
            head_dim=heads.head_dim,
            rotary_dim=rotary_dim,
            window=heads.window,
            top_k=0 if chosen is None else chosen.cols,
            scale=heads.head_dim**-0.5,
        )
        builder.emit(op, out)
        return out

    def _check(self, heads: CompressedHeads, far: TracedEntries | None) -> None:
        positions, rotary_dim = heads.rope.cos_sin.shape
        index = None if far is None else far.index
        widths = [heads.head_dim, *([] if index is None else [index.keys.width])]
        if max(widths) > self._builder.constants.max_head or any(width % 2 for width in widths):
            raise Unsupported(f"compressed attention over heads of {max(widths)} columns")
        if rotary_dim % 2 or rotary_dim > min(widths):
            raise Unsupported(f"a rotary table of {rotary_dim} columns for {min(widths)}")
        if index is not None and index.keys.width > MAX_INDEX:
            raise Unsupported(f"an index of entries with heads of {index.keys.width} columns")
        if far is not None and positions // far.place.rate > MAX_ENTRIES:
            raise Unsupported(f"attention to more than {MAX_ENTRIES} entries")

    def _rotate(
        self, x: TracedTensor, heads: CompressedHeads, count: int, *, norm: bool = False
    ) -> None:
        table = heads.rope.cos_sin
        op = TurnHeads(
            x=x.id,
            cos_sin=self._builder.vector(table),
            num_heads=count,
            head_dim=x.cols // count,
            rotary_dim=table.shape[1],
            norm=norm,
            eps=heads.eps,
        )
        self._builder.emit(op, x)

    def _tokens(self, layer: int, columns: int) -> TokenRows:
        pages = self._pages.get(layer)
        if pages is None:
            raise Unsupported("compressed attention of a layer without pages")
        shape = pages.shape
        if not (shape.tokens and shape.shared) or shape.head_dim < columns:
            raise Unsupported("compressed attention over pages without a row for each token")
        return TokenRows(
            memory=self._builder.graph.constant(pages.keys),
            width=padded(shape.head_dim),
            page_size=shape.page_size,
            table=pages.group,
            step=pages.steps[0],
        )

    def _place(self, place: EntryPlace, width: int, column: int = 0) -> EntryRows:
        """Entries of `width`, `column` columns after the first of their layer."""
        assert width % place.block == 0
        last = place.column + column + width // place.block
        return EntryRows(
            tokens=self._tokens(place.layer, last),
            rate=place.rate,
            block=place.block,
            column=place.column + column,
            width=width,
        )

    def _store(self, rows: EntryInputs, entries: EntryRows, heads: CompressedHeads) -> None:
        """Emit sums over tokens, and the store of entries that become complete."""
        builder, parts, table = self._builder, 2 if rows.overlaps else 1, heads.rope.cos_sin
        for x in (rows.values, rows.logits):
            if x.dtype != "f32" or x.cols != parts * rows.width:
                raise Unsupported(f"entries of {x.dtype} rows of {x.cols} columns")
        sums = builder.new(rows.width, "f32", rows.values)
        scan = EntryScan(
            values=rows.values.id,
            logits=rows.logits.id,
            bias=builder.table(rows.bias),
            state=self._state_of(rows.part, (parts, 3, rows.width)),
            out=sums.id,
            cols=rows.width,
            rate=entries.rate,
            bias_stride=padded(parts * rows.width),
            overlaps=rows.overlaps,
        )
        builder.emit(scan, sums, dtype=builder.dtype)
        store = EntryStore(
            x=sums.id,
            norm=builder.vector(rows.norm.weight, rows.norm.offset),
            cos_sin=builder.vector(table),
            entries=entries,
            cols=rows.width,
            rotary_dim=table.shape[1],
            eps=rows.norm.eps,
        )
        builder.emit(store, sums, dtype=builder.dtype)

    def _choose(
        self, index: EntryIndex, place: EntryPlace, heads: CompressedHeads, column: int
    ) -> TracedTensor:
        """Emit the choice of entries; their keys lie behind `column` columns of each entry."""
        builder, count = self._builder, index.weights.cols
        builder.expect(index.q, "an index of entries")
        if index.weights.dtype != "f32" or index.q.cols != count * index.keys.width:
            raise Unsupported(f"{count} heads of an index over {index.q.cols} columns")
        keys = self._place(place, index.keys.width, column // place.block)
        self._store(index.keys, keys, heads)
        self._rotate(index.q, heads, count)
        chosen = builder.repeated(index.top_k, "i32", "tokens", 1)
        if self._scores is None:
            self._scores = builder.graph.constant(allocate(SCORES_MIB << 20))
        for op in (EntryScores, EntryChoice):
            scores = op(
                entries=keys,
                q=index.q.id,
                weights=index.weights.id,
                scores=self._scores,
                chosen=chosen.id,
                num_heads=count,
                top_k=index.top_k,
                scores_mib=SCORES_MIB,
            )
            builder.emit(scores, index.q)
        return chosen
