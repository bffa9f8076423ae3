"""Low-rank adapters of some requests of a step.

Shapes: T rows, R rows that have an adapter, S slots of adapters, P parts of a layer's outputs, M
rows of the largest step. R is T if the rows are a step's outputs.
"""

from __future__ import annotations

from typing import Annotated

from sylvan.kernels.native.schema import Op, Operands, operands, reads, updates, writes


@operands
class LoraTables(Operands):
    """Rows by adapter slot, and the slots' matrices; see `kernels.adapters`.

    `slot_rows`: the number of slots with rows; for each its number, the index of its first row in
    the list and the row count; then the list; then the slot of each row of the step (-1: none).
    `factors`: addresses, rank and scale of the matrices, by slot and part. `width`: columns of each
    part between the two products. `max_tokens`: M.
    """

    slot_rows: Annotated[int, reads("i32", "1 + 3 S + M + M")]
    factors: Annotated[int, reads("u8", "S, P, 24")]
    slots: int
    max_tokens: int
    parts: int
    width: int


@operands
class LoraPairs(Op):
    """`LoraTables.slot_rows` of a layer of E experts, of which a row visits K.

    Its rows are pairs of a row and an expert, sorted by expert; each expert has S slots of its own,
    one after another. `step_rows` are those of the step, `groups` and `sorted_pairs` as `MoeAlign`
    has them: of this rank's experts.
    """

    step_rows: Annotated[int, reads("i32", "1 + 3 S + M + M")]
    groups: Annotated[int, reads("i32", "1 + 3 groups")]
    sorted_pairs: Annotated[int, reads("i32", "T K")]
    slot_rows: Annotated[int, writes("i32", "1 + 3 S E + M K")]
    slots: int
    max_tokens: int
    num_experts: int
    top_k: int


@operands
class LoraShrink(Op):
    """Multiplies rows by the first matrix of their adapter, in the order of the list of rows."""

    x: Annotated[int, reads("row", "T, C")]
    inner: Annotated[int, writes("row", "R, P, width")]
    tables: LoraTables
    x_bytes: int


@operands
class LoraLookup(Op):
    """`LoraShrink` for ids: the first matrix is a table of `num_ids` rows."""

    inner: Annotated[int, writes("row", "R, P, width")]
    tables: LoraTables
    num_ids: int


@operands
class LoraExpand(Op):
    """Multiplies by the second matrix and its scale, and adds to rows; `f32`: rows are float32."""

    y: Annotated[int, updates("row", "T, outputs")]
    inner: Annotated[int, reads("row", "R, P, width")]
    part_cols: Annotated[int, reads("i32", "P")]
    tables: LoraTables
    y_stride: int
    f32: bool = False
