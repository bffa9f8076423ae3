"""Lowers a traced graph to one JAX function of weights, pages and step inputs.

Shapes: T rows of tokens, S rows of outputs, R rows of vectors, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native import opset
from sylvan.kernels.native.graph import Graph, HostCall
from sylvan.kernels.native.schema import Op
from sylvan.kernels.xla import experts, heads, lora, rows, sparse
from sylvan.kernels.xla.attention import Attend
from sylvan.kernels.xla.values import (
    DTYPES,
    LoraStack,
    PaddedInputs,
    Pages,
    Values,
    Weights,
)

Array: TypeAlias = jax.Array
Lowering = Callable[[Values, Any], None]
HostLowering = Callable[[Values, int, Array], Array]
"""Computes a host call of the graph, by its number, from its rows."""


def _nothing(v: Values, op: Op) -> None:
    """No-op: the previous or a later op includes this one."""


LOWERINGS: Mapping[type[Op], Lowering] = MappingProxyType(
    {
        opset.Embed: rows.embed,
        opset.RmsNorm: rows.rms_norm,
        opset.LayerNorm: rows.layer_norm,
        opset.Linear: rows.linear,
        opset.Glu: rows.glu,
        opset.Activation: rows.activation,
        opset.Xielu: rows.xielu,
        opset.TakeRows: rows.take_rows,
        opset.Add: rows.add,
        opset.Scale: rows.scale,
        opset.Softcap: rows.softcap,
        opset.Cast: rows.cast,
        opset.Clamp: rows.clamp,
        opset.ScaleRows: rows.scale_rows,
        opset.Route: experts.route,
        opset.MoeAlign: experts.moe_align,
        opset.GatherRows: experts.gather_rows,
        opset.ExpertSum: experts.expert_sum,
        opset.RopeStore: heads.rope_store,
        opset.Attention: heads.attention,
        opset.AttentionMerge: _nothing,
        opset.LatentRows: heads.latent_rows,
        opset.HeadGroups: heads.head_groups,
        opset.ToStack: heads.to_stack,
        opset.FromStack: heads.from_stack,
        opset.TokenStore: sparse.token_store,
        opset.IndexScores: _nothing,
        opset.IndexChoice: sparse.index_choice,
        opset.SparseAttention: sparse.sparse_attention,
        opset.LoraPairs: lora.lora_pairs,
        opset.LoraShrink: lora.lora_shrink,
        opset.LoraLookup: lora.lora_lookup,
        opset.LoraExpand: lora.lora_expand,
        HostCall: rows.host_call,
    }
)
"""Lowering of each op; ops of quantised weights and of several ranks have none."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Results of a step that stay on the device.

    Attributes:
        logits: Float32 (S, V).
        hidden: Hidden vectors after the final norm, float32 (T, D).
        layers: Outputs of the layers that are kept, float32 (T, D).
        loads: Rows of each expert, int32 (E,), by the order of `LoweredProgram.loads`.
    """

    logits: Array
    hidden: Array
    layers: Sequence[Array]
    loads: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Edit:
    """A buffer whose rows given vectors replace or are added to, before a segment begins."""

    buffer: int
    segment: int
    adds: bool


@dataclass(frozen=True, slots=True)
class OutputBuffers:
    """Numbers of the buffers that are read after a step; `layers` in the requested order.

    `head`: the segment of the head, whose input is `taken`. `edits`: buffers that a step may
    change, in order.
    """

    hidden: int
    taken: int
    logits: int
    layers: Sequence[int]
    head: int
    edits: Sequence[Edit] = ()


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Arrays that a step consumes and returns: pages of attention, and recurrent states by part."""

    pages: Mapping[int, Pages]
    states: Mapping[int, Array]


@dataclass(frozen=True, slots=True)
class ReadArrays:
    """Inputs that a step reads and does not change.

    Attributes:
        adapters: Adapters of the layers, by the number of the constant that describes them.
        items: Keys and values of encoded items, by layer of the model; an item is a page.
    """

    adapters: Mapping[int, LoraStack]
    items: Mapping[int, Pages]


class LoweredProgram:
    """A graph whose ops all have a lowering.

    Args:
        graph: The traced graph, whose weights are not packed.
        layers: Attention layer of each constant of keys, by its number.
        ends: See `OutputBuffers`.
        attend: Attention over pages.
        call: Computes host calls; None: the graph has none.
        every: Ops of the graph and of its host calls; default: those of the graph.

    Attributes:
        loads: Constants that count rows of experts, in the order in which `Outputs` has them.

    Raises:
        Unsupported: an op has no lowering; the message names it.
    """

    def __init__(
        self,
        graph: Graph,
        layers: Mapping[int, int],
        ends: OutputBuffers,
        attend: Attend,
        call: HostLowering | None = None,
        every: Sequence[Op] = (),
    ) -> None:
        every = every or graph.ops
        if lacking := sorted({type(op).__name__ for op in every} - _names()):
            raise Unsupported(f"ops without a lowering to JAX: {', '.join(lacking)}")
        self.graph, self.ends = graph, ends
        self._layers, self._attend, self._call = layers, attend, call
        self.loads = [~op.load for op in every if isinstance(op, opset.MoeAlign)]

    def step(
        self,
        weights: Weights,
        memory: ProgramMemory,
        inputs: PaddedInputs,
        read: ReadArrays,
    ) -> tuple[ProgramMemory, Outputs]:
        """Compute all rows of a step while JAX traces it; return the updated memory."""
        values = self._values(weights, inputs, read.adapters)
        values.items = read.items
        values.pages, values.states = {**memory.pages}, {**memory.states}
        edits = zip(self.ends.edits, inputs.edits, strict=True) if inputs.edits else ()
        _run(values, self.graph.ops, [*edits])
        ends, wide = self.ends, values.wide
        found = Outputs(
            logits=wide(ends.logits),
            hidden=wide(ends.hidden),
            layers=[wide(layer) for layer in ends.layers],
            loads=[values.loads[ref] for ref in self.loads],
        )
        return ProgramMemory(values.pages, values.states), found

    def head(
        self,
        weights: Weights,
        vectors_RD: Array,
        slots_R: Array | None = None,
        adapters: Mapping[int, LoraStack] = MappingProxyType({}),
    ) -> Array:
        """Logits of float32 vectors, float32 (R, V); `slots_R` are their adapters."""
        none, every = jnp.zeros(0, jnp.int32), jnp.arange(vectors_RD.shape[0])
        inputs = PaddedInputs({}, none, (), every, jnp.int32(0), adapters=slots_R)
        values = self._values(weights, inputs, adapters)
        values.buffers[self.ends.taken] = vectors_RD.astype(DTYPES[self._taken_type])
        _run(values, [op for op in self.graph.ops if op.segment >= self.ends.head])
        return values.wide(self.ends.logits)

    def _values(
        self, weights: Weights, inputs: PaddedInputs, adapters: Mapping[int, LoraStack]
    ) -> Values:
        return Values(
            self.graph,
            weights,
            inputs,
            self._attend,
            {},
            self._layers,
            adapters=adapters,
            call=self._call,
        )

    @staticmethod
    def run_inner(values: Values, ops: Sequence[Op], given: int, made: int, x: Array) -> Array:
        """Run the ops inside a host call, from the rows of buffer `given` to those of `made`."""
        values.buffers[given] = x
        _run(values, ops)
        return values.rows(made)

    @property
    def _taken_type(self) -> Any:
        taking = (op for op in self.graph.ops if isinstance(op, opset.TakeRows))
        return next(op.dtype for op in taking if op.out == self.ends.taken)


def _run(
    values: Values,
    ops: Sequence[Op],
    edits: Sequence[tuple[Edit, tuple[Array, Array]]] = (),
) -> None:
    waiting = [*edits]
    for op in ops:
        while waiting and op.segment >= waiting[0][0].segment:
            _edit(values, *waiting.pop(0))
        with jax.named_scope(type(op).__name__):
            LOWERINGS[type(op)](values, op)


def _edit(values: Values, edit: Edit, given: tuple[Array, Array]) -> None:
    vectors_TD, has_one_T = given
    x = values.wide(edit.buffer)
    new = x + vectors_TD if edit.adds else vectors_TD
    kind = values.rows(edit.buffer).dtype
    values.buffers[edit.buffer] = jnp.where(has_one_T[:, None], new, x).astype(kind)


def _names() -> set[str]:
    return {op.__name__ for op in LOWERINGS}


for _class, _fields in (
    (Outputs, ("logits", "hidden", "layers", "loads")),
    (Weights, ("matrices", "vectors", "tensors")),
    (ProgramMemory, ("pages", "states")),
    (ReadArrays, ("adapters", "items")),
    (LoraStack, ("down", "up", "scales")),
):
    jax.tree_util.register_dataclass(_class, data_fields=_fields, meta_fields=())
