"""Ops on rows: embedding, norms, linears, non-linearities, arithmetic.

Shapes: T rows of the op (its `rows` times `times`), C columns, G groups of inputs with a scale.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from sylvan.kernels.native.schema import BufferRef, Op, Operands, operands, reads, updates, writes


class Function(IntEnum):
    """Element-wise functions."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU2 = 4
    SIGMOID = 5
    TANH = 6
    QUICK_GELU = 7


class ClampForm(IntEnum):
    """How a gated activation is clamped; see `sylvan.kernels.api.Clamping`."""

    NONE = 0
    GPT_OSS = 1
    INPUTS = 2
    OUTPUTS = 3


class Source(IntEnum):
    """The step input that an embedding looks up."""

    IDS = 0
    POSITIONS = 1
    TOKEN_TYPES = 2


class WeightFormat(IntEnum):
    """Storage form of a packed matrix."""

    DENSE = 0
    INT8 = 1
    INT4 = 2
    CODED = 3


class Code(IntEnum):
    """Meaning of a matrix's codes."""

    INT4 = 0
    INT8 = 1
    FP8_E4M3 = 2
    FP4_E2M1 = 3
    NF4 = 4
    UINT4 = 5
    FP4_BNB = 6
    IQ4_NL = 7
    IQ3_XXS = 8
    IQ3_S = 9
    IQ2 = 10
    INT6 = 11


class ScaleType(IntEnum):
    """Type of the scales in memory; I8: multiples of float16 steps, and shifts as well."""

    F32 = 0
    F16 = 1
    BF16 = 2
    I8 = 3


@operands
class QuantisedRows(Operands):
    """The op's result quantised to int8 as well, row by row: the largest magnitude becomes 127.

    Ops with these operands quantise their rows for the linears that read them. `biased`: 128 is
    added, because the int8 kernels multiply unsigned numbers. `bytes`: of a row.
    """

    qvalues: Annotated[BufferRef, writes("u8", "T, bytes")] = None
    scales: Annotated[BufferRef, writes("f32", "T")] = None
    sums: Annotated[BufferRef, writes("i32", "T, G")] = None
    group: int = 0
    biased: bool = False
    bytes: int = 0


NOT_QUANTISED = QuantisedRows()


@operands
class ResidualStream(Operands):
    """Input of a norm: x, or the residual after adding x.

    With `base`, x is added to that instead, and the residual is only written. One of residual and x
    may be absent.
    """

    residual: Annotated[BufferRef, updates("f32", "T, C")] = None
    x: Annotated[BufferRef, reads("row", "T, C")] = None
    base: Annotated[BufferRef, reads("row", "T, C")] = None


@operands
class Embed(Op):
    """Looks up rows of a packed matrix, times `scale`; larger ids read the last row.

    With `is_part`, the matrix has the rows of a table from `first_row` on; other ids give zeros.
    """

    out: Annotated[int, writes("f32", "T, C")]
    weight: Annotated[int, reads("packed", "vocab_rows, C")]
    col_scale: Annotated[BufferRef, reads("f32", "vocab_rows (int8) or G, vocab_rows (int4)")] = (
        None
    )
    source: Source
    cols: int
    vocab_rows: int
    format: WeightFormat = WeightFormat.DENSE
    zeros: Annotated[BufferRef, reads("u8", "G, vocab_rows (coded)")] = None
    shifts: Annotated[BufferRef, reads("packed", "G, vocab_rows (coded)")] = None
    steps: Annotated[BufferRef, reads("packed", "C / 256, vocab_rows (coded)")] = None
    code: Code = Code.INT4
    scale_type: ScaleType = ScaleType.F32
    per_row: bool = False
    words: int = 0
    group: int = 0
    first_row: int = 0
    is_part: bool = False
    scale: float = 1.0


@operands
class RmsNorm(Op):
    """Divides rows by their root mean square, times a weight that is zero in the padding."""

    stream: ResidualStream
    weight: Annotated[int, reads("f32", "C")]
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    eps: float


@operands
class LayerNorm(Op):
    """Subtracts the mean, divides by the standard deviation, times a weight, plus a bias."""

    stream: ResidualStream
    weight: Annotated[int, reads("f32", "C")]
    bias: Annotated[BufferRef, reads("f32", "C")] = None
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    eps: float


@operands
class Quantise(Op):
    """Quantises rows to int8 if the op that produces them cannot."""

    x: Annotated[int, reads("row", "T, C")]
    quantised: QuantisedRows
    cols: int


@operands
class Linear(Op):
    """Multiplies rows by a matrix, plus a bias.

    Linears are traced as this op; packing decides the format. With `groups` (their number; then
    matrix, first row and row count of each), the weight is a stack of matrices. `words`: 32-bit
    words of inputs in a block of 16 outputs. `x_bytes`: stride of the rows of x. Head steps:
    strides of x (bytes) and out (columns) between the matrices of a stack. `parts`: number of equal
    input parts whose products are summed over a tree; dense matrices only.
    """

    x: Annotated[int, reads("row", "T, C or bytes")]
    weight: Annotated[int, reads("packed", "outputs, C")]
    bias: Annotated[BufferRef, reads("f32", "outputs")] = None
    out: Annotated[int, writes("row", "T, outputs or a stack of them")]
    row_scale: Annotated[BufferRef, reads("f32", "T")] = None
    col_scale: Annotated[BufferRef, reads("f32", "outputs (int8) or G, outputs (int4)")] = None
    sums: Annotated[BufferRef, reads("i32", "outputs (int8) or T, G (int4)")] = None
    groups: Annotated[BufferRef, reads("i32", "1 + 3 groups")] = None
    cols: int
    outputs: int
    out_f32: bool = False
    words: int = 0
    group: int = 0
    x_bytes: int = 0
    x_head_step: int = 0
    out_head_step: int = 0
    out_stride: int = 0
    parts: int = 1


@operands
class LinearInt8(Linear):
    """`Linear` with int8 weights and a scale per output; x is quantised rows."""


@operands
class LinearInt4(Linear):
    """`Linear` with int4 weights and a scale per group of inputs and output."""


@operands
class LinearCoded(Linear):
    """`Linear` with coded weights, (value - zero) scale + shift; x is not quantised.

    Without `zeros` and `shifts`, integers are centred on the middle of their range. Scales are of
    `scale_type`; with `per_row`, there is one per output for all groups. Shifts are multiplied by
    the sums of x, `x_sums`. `steps`: of int8 scales and shifts, one of each for 256 inputs.
    """

    zeros: Annotated[BufferRef, reads("u8", "G, outputs")] = None
    shifts: Annotated[BufferRef, reads("packed", "G, outputs")] = None
    steps: Annotated[BufferRef, reads("packed", "C / 256, outputs")] = None
    x_sums: Annotated[BufferRef, reads("f32", "T, G")] = None
    code: Code
    scale_type: ScaleType
    per_row: bool


@operands
class GroupSums(Op):
    """Sums each group of columns of x."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("f32", "T, G")]
    cols: int
    group: int


@operands
class TakeColumns(Op):
    """Permutes columns: column i of out is column order[i] of x."""

    x: Annotated[int, reads("row", "T, C")]
    order: Annotated[int, reads("i32", "C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    x_stride: int


@operands
class Glu(Op):
    """Applies a function to the first half of each row and multiplies by the second half.

    Rows after the last of `groups` stay unchanged.
    """

    gate_up: Annotated[int, reads("row", "T, 2 C")]
    groups: Annotated[BufferRef, reads("i32", "1 + 3 groups")] = None
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    function: Function
    clamp: ClampForm = ClampForm.NONE
    alpha: float = 1.0
    limit: float = 0.0


@operands
class Activation(Op):
    """Applies a function elementwise."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int
    function: Function


@operands
class Xielu(Op):
    """xIELU (arXiv:2411.13010): a parabola above zero, an exponential below, and a line."""

    x: Annotated[int, reads("row", "T, C")]
    alpha_p: Annotated[int, reads("f32", "1")]
    alpha_n: Annotated[int, reads("f32", "1")]
    beta: Annotated[int, reads("f32", "1")]
    eps: Annotated[int, reads("f32", "1")]
    out: Annotated[int, writes("row", "T, C")]
    quantised: QuantisedRows = NOT_QUANTISED
    cols: int


@operands
class TakeRows(Op):
    """Selects the rows that need logits."""

    x: Annotated[int, reads("row", "tokens, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int


@operands
class JoinColumns(Op):
    """Concatenates rows: the columns of a, then those of b."""

    a: Annotated[int, reads("row", "T, a_cols")]
    b: Annotated[int, reads("row", "T, b_cols")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    a_cols: int
    b_cols: int


@operands
class Add(Op):
    """Computes a_scale a + scale b; `a_f32`, `b_f32` and `out_f32` mark float32 rows."""

    a: Annotated[int, reads("row", "T, C")]
    b: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    a_f32: bool = False
    b_f32: bool = False
    out_f32: bool = False
    a_scale: float = 1.0
    scale: float = 1.0


@operands
class Scale(Op):
    """Multiplies rows by a number; `f32` marks float32 rows."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    f32: bool = False
    factor: float


@operands
class Softcap(Op):
    """Computes cap tanh(x / cap); `f32` marks float32 rows."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    f32: bool = False
    cap: float


@operands
class Clamp(Op):
    """Clamps rows to -limit .. limit."""

    x: Annotated[int, reads("row", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    limit: float


@operands
class Cast(Op):
    """Casts float32 rows to the rows' type."""

    x: Annotated[int, reads("f32", "T, C")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int


@operands
class ScaleRows(Op):
    """Multiplies each row by column 0 of its factors."""

    x: Annotated[int, reads("row", "T, C")]
    factors: Annotated[int, reads("row", "T, 1")]
    out: Annotated[int, writes("row", "T, C")]
    cols: int
