"""Programs whose operands are wrong are refused when they are loaded, with the operand's name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, Rope
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.binding import OP
from sylvan.kernels.native.codegen import snake
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.kernels.native.opset import (
    OPS,
    Attention,
    CompressedAttention,
    EntryChoice,
    EntryScan,
    EntryStore,
    KeyStore,
    Linear,
    RopeStore,
    Route,
    StreamCollapse,
    TurnHeads,
)
from sylvan.kernels.native.part import NativePart
from sylvan.kernels.native.schema import Op, fields_of
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.paged.cache import PageShape, allocate_pages

try:
    LIBRARY = load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

HEADS = {"head_dim": 8, "rotary_dim": 2, "tokens__width": 8}
LIMITS = ProgramLimits(max_tokens=64, max_outputs=4)
UNBOUND = [np.empty(0, np.uint8)]  # bound later: its size is not known


def record(kind: type[Op]) -> np.ndarray:
    """One op: entry 0 for each buffer that must be there, counts of 1 and first choices."""
    made = np.zeros(1, OP)
    made["kind"], made["times"] = OPS.index(kind), 1
    for place, field in enumerate(fields_of(kind)):
        made["operands"][0, place] = -1 if field.optional else field.kind == "int"
    return made


@pytest.mark.parametrize("kind", OPS, ids=lambda kind: kind.__name__)
def test_each_buffer_must_be_one_of_the_program(kind):
    for place, field in enumerate(fields_of(kind)):
        made = record(kind)
        if field.kind in ("bool", "enum"):
            made["operands"][0, place] = 99
            reason = rf"{snake(kind.__name__)}: {field.name} is 99 of \d+ choices"
        elif field.kind == "buffer":
            made["operands"][0, place] = 1
            reason = f"{snake(kind.__name__)}: {field.name} is entry 1 of 1"
        else:
            continue
        with pytest.raises(ValueError, match=f"^{reason}$"):
            NativePart(LIBRARY, made, UNBOUND)


@pytest.mark.parametrize("kind", OPS, ids=lambda kind: kind.__name__)
def test_a_buffer_is_only_absent_where_an_op_says_so(kind):
    for place, field in enumerate(fields_of(kind)):
        if field.kind != "buffer":
            continue
        for number in (-1, -2):
            if number == -1 and field.optional:
                continue
            made = record(kind)
            made["operands"][0, place] = number
            with pytest.raises(ValueError, match=f"{field.name} is missing"):
                NativePart(LIBRARY, made, UNBOUND)


def test_rows_must_fit_their_memory():
    small = {
        (kind.__name__, field.name)
        for kind in OPS
        for place, field in enumerate(fields_of(kind))
        if field.kind == "buffer" and refuses_a_byte(kind, place)
    }

    assert {("RmsNorm", "stream.x"), ("RmsNorm", "weight"), ("Glu", "out")} < small
    assert {("Linear", "x"), ("Linear", "weight"), ("Linear", "out")} < small
    assert {("DeltaScan", "q"), ("ShortConv", "weight"), ("Route", "experts")} < small
    assert {("Attention", "qkv"), ("Attention", "parts"), ("RopeStore", "qkv")} < small
    assert len(small) > 120


def refuses_a_byte(kind: type[Op], place: int) -> bool:
    made, memory = record(kind), [*UNBOUND, np.zeros(1, np.uint8)]
    made["operands"][0, place] = 1
    try:
        NativePart(LIBRARY, made, memory, (16, 16))
    except ValueError as error:
        return "bytes" in str(error) or fields_of(kind)[place].name in str(error)
    return False


def test_kinds_and_rows_that_no_op_has_are_refused():
    for name, number in (("kind", len(OPS)), ("kind", -1), ("rows", 2), ("dtype", 2)):
        made = record(Linear)
        made[name] = number
        with pytest.raises(ValueError, match=r"op -?\d+ of|rows \d of type"):
            NativePart(LIBRARY, made, UNBOUND)


def changed(kind: type[Op], **operands: int) -> np.ndarray:
    made = record(kind)
    names = [field.name for field in fields_of(kind)]
    for name, value in operands.items():
        made["operands"][0, names.index(name.replace("__", "."))] = value
    return made


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (changed(Attention, kv__num_heads=6, kv__num_kv_heads=4), "6 query heads for 4 KV heads"),
        (changed(Attention, kv__num_kv_heads=0), "1 query heads for 0 KV heads"),
        (changed(Attention, kv__head_dim=577), "heads of 577 columns, of 1 to 576"),
        (changed(Attention, kv__page_size=0), "pages of 0 tokens"),
        (changed(RopeStore, rotary_dim=3, kv__head_dim=4), "3 rotary columns of heads of 4"),
        (changed(RopeStore, rotary_dim=4, kv__head_dim=2), "4 rotary columns of heads of 2"),
        (changed(RopeStore, rotary_dim=4, kv__head_dim=4, cos_sin=-1), "4 rotary columns"),
        (changed(Route, top_k=3, num_experts=2), "3 of 2 experts"),
        (changed(Route, top_k=2, num_experts=1025), "2 of 1025 experts, at most 64 of 1024"),
        (changed(Route, top_k=1, num_experts=6, groups=4), "6 experts in 4 groups"),
        (changed(Linear, words=0), "x has no columns"),
        (changed(Attention, blocks__size=4, blocks__near=0), "blocks of 4 tokens, 0 near ones"),
        (changed(Route, by_token=0, vocab_rows=0), "by_token has no columns"),
        (changed(TurnHeads, head_dim=4, rotary_dim=6), "6 rotary columns of heads of 4"),
        (changed(KeyStore, cols=577, rotary_dim=2), "heads of 577 columns"),
        (
            changed(KeyStore, cols=8, rotary_dim=4, tokens__width=4),
            "8 columns in pages of 1 rows of 4",
        ),
        (
            changed(EntryStore, cols=8, rotary_dim=4, entries__block=4, entries__rate=2),
            "entries of 1 columns over 4 of 2 tokens",
        ),
        (changed(EntryScan, overlaps=1), "1 columns of entries of 1 tokens"),
        (
            changed(EntryChoice, entries__width=300, entries__tokens__width=400),
            "1 heads of 300 columns choose 1",
        ),
        (
            changed(CompressedAttention, **HEADS, entries__rate=0, window=0),
            "a window of 0 tokens",
        ),
        (
            changed(CompressedAttention, **HEADS, entries__width=4, entries__tokens__width=8),
            "entries of 4 columns for heads of 8",
        ),
        (changed(StreamCollapse, cols=16, num_streams=9, outputs=9), "9 streams of 16 columns"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operands_must_fit_each_other(made, reason):
    with pytest.raises(ValueError, match=reason):
        NativePart(LIBRARY, made, UNBOUND)


def test_a_program_with_less_memory_than_its_rows_need_is_refused():
    """Each buffer of a traced program in turn is made too short."""
    shape = PageShape(num_kv_heads=2, head_dim=16, value_dim=16, page_size=16, dtype=torch.float32)
    pages = {0: allocate_pages(shape, 4).layers[0]}
    tracer = NativeTracer(torch.float32, LIMITS, pages, LIBRARY.constants)
    x = tracer.input(64, "f32")
    normed, _ = ops.rms_norm(x, torch.ones(64), 1e-6)
    qkv = ops.linear(normed, torch.randn(8 * 16, 64), None)
    layer = AttentionLayer(index=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    out = ops.attention(qkv, layer, Rope(torch.zeros(128, 16)))
    tracer.pin(ops.linear(out, torch.randn(64, 64), torch.zeros(64)))
    layout = compile_graph(tracer.graph)
    rows = LIMITS.max_tokens, LIMITS.max_outputs
    records = layout.records_of(range(len(layout.ops)))
    NativePart(LIBRARY, records, layout.memory, rows)
    refused = 0
    for entry, whole in enumerate(layout.memory):
        memory = list(layout.memory)
        memory[entry] = allocate(whole.nbytes)[: max(1, whole.nbytes // 64)]
        try:
            NativePart(LIBRARY, records, memory, rows)
        except ValueError:
            refused += 1

    assert refused >= len(layout.memory) - 4  # pages and rotary tables have sizes of their own
