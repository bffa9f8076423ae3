"""Runs modules without ops (recurrent mixers, gated attention) within a step on JAX.

While JAX traces a step, the modules' own PyTorch code runs once, on tensors that wrap JAX values
(`sylvan.kernels.xla.tensors`).

Shapes: T rows, H query heads, K key heads, D columns of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, cast

import jax
import torch
from torch import nn

from sylvan.kernels.adapters import LoraLayer
from sylvan.kernels.api import AttentionLayer, HostFunction, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import QuantisedWeight
from sylvan.kernels.native.opset import Source
from sylvan.kernels.native.schema import Op
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.xla import lora
from sylvan.kernels.xla.attention import Biases, HeadSpec, store
from sylvan.kernels.xla.grouped import expert_product
from sylvan.kernels.xla.spans import XlaScans, XlaSpans
from sylvan.kernels.xla.tensors import JaxTensor, Leaves, TorchLowering
from sylvan.kernels.xla.values import Values
from sylvan.runtime.attention.jnp import JnpAttention
from sylvan.runtime.layers.cross import CrossAttention
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.moe import MoE
from sylvan.runtime.layers.recurrent import Recurrent
from sylvan.runtime.layers.routed import RoutedProjection
from sylvan.runtime.models.checkpoint import load_deferred

Array: TypeAlias = jax.Array


class TorchModules:
    """Lowers the host calls of a traced graph. Implements `HostLowering`.

    Args:
        modules: The modules that host calls run.
        functions: Functions of the graph, which call the modules.
        dtype: Type of activations.
        groups: KV group of each attention layer.

    Attributes:
        leaves: Weights and tables that the modules read.
        layers: Adapters of their linear layers, by numbers that no constant of the graph has.
        cross: Cross-attention layers, by layer of the model.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Sequence[HostFunction],
        dtype: torch.dtype,
        groups: Mapping[int, int],
    ) -> None:
        self._functions, self._groups = functions, groups
        self.leaves = Leaves()
        self.layers: dict[int, LoraLayer] = {}
        self.cross: dict[int, CrossAttention] = {}
        self._values: Values | None = None
        self._value: Callable[[torch.Tensor], Array] | None = None
        self._finding = True
        whole = nn.ModuleList(modules)
        self._inner = [part for part in whole.modules() if isinstance(part, InnerProgram)]
        load_deferred(whole)
        for part in whole.modules():
            _expand(part, dtype)
            if isinstance(part, Recurrent):
                part.scans = XlaScans()
            if isinstance(part, RoutedProjection):
                part.product = self._product
            if isinstance(part, CrossAttention):
                self.cross[part.layer] = part
                vars(part)["attend"] = self._items_of(part)
            if isinstance(part, Linear) and part.lora is not None:
                number = -1 - len(self.layers)
                self.layers[number] = part.lora
                vars(part)["adapted"] = self._changes(number)  # of this one only

    def found(self) -> None:
        """Fix the set of leaves: from now on, steps read them from their arguments."""
        self._finding = False

    def __call__(self, values: Values, function: int, x: Array) -> Array:
        leaf = self.leaves.meet if self._finding else self.leaves.among(values.weights.tensors)
        lowering = TorchLowering(leaf)
        batch = XlaBatch(values, self._groups, lowering)
        self._enter(values, lowering.value)
        with torch.no_grad(), lowering:
            made = self._functions[function](JaxTensor(x), batch)
        self._enter(None, None)
        values.states |= {part: held.value for part, held in batch.states.held.items()}
        return lowering.value(made)

    def _enter(self, values: Values | None, value: Callable[[torch.Tensor], Array] | None) -> None:
        self._values, self._value = values, value
        for part in self._inner:
            part.values = values

    def _product(
        self, x_PC: torch.Tensor, stack_ENC: torch.Tensor, experts_P: torch.Tensor
    ) -> torch.Tensor:
        """Implements `ExpertProduct`."""
        assert self._value is not None
        given = (self._value(x) for x in (x_PC, stack_ENC, experts_P))
        return JaxTensor(expert_product(*given))

    def _items_of(self, part: CrossAttention) -> Any:
        """Return the replacement of one layer's `CrossAttention.attend`: an item is a page."""
        shape = part.shape
        spec = HeadSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_heads,
            head_dim=shape.head_dim,
            value_dim=shape.head_dim,
            scale=shape.head_dim**-0.5 if shape.scale is None else shape.scale,
        )

        def attend(q_TNH: torch.Tensor, spans: object) -> torch.Tensor:
            del spans  # slots and lengths are values here
            values = self._values
            assert isinstance(q_TNH, JaxTensor)
            assert values is not None
            tiles = values.step.items
            assert tiles is not None
            q, (keys, held) = q_TNH.value, values.items[part.layer]
            found = values.attend(tiles.gather(q), keys, held, tiles, spec, Biases())
            return JaxTensor(tiles.scatter(found, q.shape[0]))

        return attend

    def _changes(self, number: int) -> Any:
        """Return the replacement of one layer's `Linear.adapted`."""

        def adapted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            values = self._values
            assert isinstance(x, JaxTensor)
            assert isinstance(y, JaxTensor)
            assert values is not None
            assert values.step.adapters is not None
            stack = values.adapters[number]
            inner = lora.shrink(x.value, stack, values.step.adapters)
            ends = [sum(up.shape[3] for up in stack.up[: i + 1]) for i in range(len(stack.up) - 1)]
            parts = jax.numpy.split(y.value, ends, -1)
            found = lora.expand(parts, stack, inner)
            return JaxTensor(jax.numpy.concatenate(found, -1))

        return adapted


class InnerProgram(nn.Module):
    """Replaces a MoE block inside a host call by its ops, which have lowerings to JAX.

    Attributes:
        ops: The traced ops of the block, which read weights of the graph.
        run: `LoweredProgram.run_inner`.
    """

    run: Callable[[Values, Sequence[Op], int, int, Array], Array]

    def __init__(self, ops: Sequence[Op], given: TracedTensor, made: TracedTensor) -> None:
        super().__init__()
        self.ops = ops
        self.values: Values | None = None
        self._given, self._made = given, made

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Shape: (T, D) -> (T, D)."""
        assert isinstance(x_TD, JaxTensor)
        assert self.values is not None
        return JaxTensor(self.run(self.values, self.ops, self._given.id, self._made.id, x_TD.value))


def inner_programs(modules: Sequence[nn.Module], tracer: NativeTracer) -> list[InnerProgram]:
    """Replace the MoE blocks inside `modules` by their ops.

    Raises:
        Unsupported: one cannot be traced.
    """
    found: list[InnerProgram] = []
    for root in modules:
        for name, part in list(root.named_modules()):
            if name and isinstance(part, MoE):
                first = len(tracer.graph.ops)
                given = tracer.input(part.gate.weight.shape[1], tracer.dtype)
                made: Any = part(cast("torch.Tensor", given))
                inner = InnerProgram(tracer.graph.ops[first:], given, made)
                del tracer.graph.ops[first:]
                root.set_submodule(name, inner)
                found.append(inner)
    return found


def _expand(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the quantised matrices of a module by dequantised ones."""
    for name, value in list(vars(module).items()):
        if isinstance(value, QuantisedWeight):
            delattr(module, name)
            wide = value.numbers().to(dtype)
            setattr(module, name, nn.Parameter(wide, requires_grad=False))


class StateParts:
    """The parts of recurrent states that the modules of one call read."""

    def __init__(self, arrays: Mapping[int, Array]) -> None:
        self._arrays = arrays
        self.held: dict[int, JaxTensor] = {}

    def part(self, index: int) -> JaxTensor:
        """Return all slots of one part; a module that writes it replaces its value."""
        if index not in self.held:
            self.held[index] = JaxTensor(self._arrays[index])
        return self.held[index]


class XlaBatch:
    """Replaces `ForwardBatch` while JAX traces a step."""

    def __init__(self, values: Values, groups: Mapping[int, int], lowering: TorchLowering) -> None:
        sources = values.step.sources
        self.input_ids_T = JaxTensor(sources[Source.IDS])
        self.positions_T = JaxTensor(sources[Source.POSITIONS])
        self.token_types_T = JaxTensor(sources[Source.TOKEN_TYPES])
        self.states = StateParts(values.states)
        self.attention = XlaAttention(values, groups, lowering)
        self.state_spans = None  # rows and slots are values here, see `spans`
        self.memories = ()  # as are encoded items
        self._values, self._lowering = values, lowering

    @property
    def spans(self) -> XlaSpans:
        """See `ForwardBatch.spans`."""
        rows = self._values.step.state_rows
        assert rows is not None, "a step without states"
        return XlaSpans(rows, self._lowering.value)

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"{name} of a batch has no lowering to JAX")


class XlaAttention:
    """Replaces an attention backend while JAX traces a step."""

    caps: ClassVar = replace(JnpAttention.caps, variants=True, biases=True, blocks=True)

    def __init__(self, values: Values, groups: Mapping[int, int], lowering: TorchLowering) -> None:
        self._values, self._groups, self._lowering = values, groups, lowering

    def run(
        self,
        spec: AttentionLayer,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        batch: XlaBatch,
    ) -> torch.Tensor:
        """Store keys and values, then attend. Shape: (T, H, columns of a value)."""
        del batch
        values, leaf = self._values, self._lowering.value
        group = self._groups[spec.index]
        slots, tiles = values.step.slots[group], values.step.tiles[group]
        keys, held = values.pages[spec.index]
        if not spec.causal:
            raise Unsupported("bidirectional attention within a PyTorch module")
        keys = store(keys, slots, leaf(k_TKD))
        if held is not None:  # else values are the first columns of the keys
            held = store(held, slots, leaf(v_TKD))
        values.pages[spec.index] = keys, held
        own = HeadSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            scale=spec.scale,
            window=spec.window or 0,
            chunk=spec.chunk or 0,
            softcap=spec.softcap or 0.0,
            blocks=spec.blocks,
        )
        sinks, slopes, distances = (
            None if x is None else leaf(x).astype("float32")
            for x in (spec.sinks, spec.slopes, spec.biases)
        )
        if distances is not None:
            distances = distances.reshape(spec.num_heads, -1)
        shifts = spec.blocks and jax.numpy.array(spec.blocks.shifts(spec.num_heads), "int32")
        biases, q = Biases(sinks, slopes, distances, shifts), leaf(q_THD)
        found = values.attend(tiles.gather(q), keys, held, tiles, own, biases)
        return JaxTensor(tiles.scatter(found, q.shape[0]))
