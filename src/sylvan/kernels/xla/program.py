"""Lowers a traced graph to one function of weights, pages and step inputs.

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
from sylvan.kernels.native.graph import Graph
from sylvan.kernels.native.schema import Op
from sylvan.kernels.xla import experts, heads, rows
from sylvan.kernels.xla.attention import Attend
from sylvan.kernels.xla.values import DTYPES, PaddedInputs, Pages, Values, Weights

Array: TypeAlias = jax.Array
Lowering = Callable[[Values, Any], None]


def _nothing(v: Values, op: Op) -> None:
    """What the op does is done by the one before it."""


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
    }
)
"""By op; the ops of quantised weights, adapters, ranks and recurrent layers have none."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step leaves on the device.

    Attributes:
        logits: Float32 (S, V).
        hidden: After the final norm, float32 (T, D).
        layers: Outputs of the layers that are kept, float32 (T, D).
        loads: Rows of each expert, int32 (E,), by the order of `LoweredProgram.loads`.
    """

    logits: Array
    hidden: Array
    layers: Sequence[Array]
    loads: Sequence[Array]


@dataclass(frozen=True, slots=True)
class Ends:
    """Numbers of the buffers that are read after a step; `layers` in the order wanted.

    `head`: the segment of the head, whose input is `taken`.
    """

    hidden: int
    taken: int
    logits: int
    layers: Sequence[int]
    head: int


class LoweredProgram:
    """A graph whose ops all have a lowering.

    Args:
        graph: Traced, its weights not packed.
        layers: By the number of a constant of keys, the attention layer whose they are.
        ends: See `Ends`.
        attend: Attention over pages.

    Attributes:
        loads: Constants that count rows of experts, in the order in which `Outputs` has them.

    Raises:
        Unsupported: an op has none; names it.
    """

    def __init__(self, graph: Graph, layers: Mapping[int, int], ends: Ends, attend: Attend) -> None:
        if lacking := sorted({type(op).__name__ for op in graph.ops} - _names()):
            raise Unsupported(f"ops without a lowering to JAX: {', '.join(lacking)}")
        self.graph, self.ends = graph, ends
        self._layers, self._attend = layers, attend
        self.loads = [~op.load for op in graph.ops if isinstance(op, opset.MoeAlign)]

    def step(
        self, weights: Weights, pages: Mapping[int, Pages], inputs: PaddedInputs
    ) -> tuple[dict[int, Pages], Outputs]:
        """All rows of a step, while JAX traces it. The pages come back with the new rows."""
        values = Values(self.graph, weights, inputs, self._attend, {**pages}, self._layers)
        _run(values, self.graph.ops)
        ends, wide = self.ends, values.wide
        found = Outputs(
            logits=wide(ends.logits),
            hidden=wide(ends.hidden),
            layers=[wide(layer) for layer in ends.layers],
            loads=[values.loads[ref] for ref in self.loads],
        )
        return values.pages, found

    def head(self, weights: Weights, vectors_RD: Array) -> Array:
        """Logits of float32 vectors, float32 (R, V)."""
        none = jnp.zeros(0, jnp.int32)
        inputs = PaddedInputs({}, none, (), none, jnp.int32(0))
        values = Values(self.graph, weights, inputs, self._attend, {}, self._layers)
        values.buffers[self.ends.taken] = vectors_RD.astype(DTYPES[self._taken_type])
        _run(values, [op for op in self.graph.ops if op.segment >= self.ends.head])
        return values.wide(self.ends.logits)

    @property
    def _taken_type(self) -> Any:
        taking = (op for op in self.graph.ops if isinstance(op, opset.TakeRows))
        return next(op.dtype for op in taking if op.out == self.ends.taken)


def _run(values: Values, ops: Sequence[Op]) -> None:
    for op in ops:
        with jax.named_scope(type(op).__name__):
            LOWERINGS[type(op)](values, op)


def _names() -> set[str]:
    return {op.__name__ for op in LOWERINGS}


for _class, _fields in (
    (Outputs, ("logits", "hidden", "layers", "loads")),
    (Weights, ("matrices", "vectors")),
):
    jax.tree_util.register_dataclass(_class, data_fields=_fields, meta_fields=())
