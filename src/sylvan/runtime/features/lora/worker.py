"""Worker half: host copies, slots, and which rows of a step use which adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from sylvan.kernels.adapters import LoraLayer, LoraRows
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.commands import ExecutorCommand, LoadAdapter
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.capability import CapabilityWorker, Handler, Report, StepContext
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.executor.trees import computed_ends
from sylvan.runtime.features.lora.store import AdapterStore, HostCopy
from sylvan.runtime.features.lora.work import AdapterRows, LoraWork
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.models.adapters import AdapterTargets
from sylvan.runtime.models.files import open_weights
from sylvan.runtime.models.stored import WeightFiles

_IDLE_WAIT_S = 0.005  # seconds to wait for copies in steps without rows, instead of polling


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraCapacity:
    """Capacity.

    Attributes:
        slots: Adapters in one step.
        max_rank: Largest rank of a module.
        max_bytes: Largest size of a host copy.
    """

    slots: int
    max_rank: int
    max_bytes: int


class LoraWorker(CapabilityWorker):
    """Applies adapters in the linear layers of its model."""

    name: ClassVar = "lora"
    in_layers: ClassVar = True

    def __init__(self, context: ModelContext, capacity: LoraCapacity) -> None:
        self._model_context, self._capacity = context, capacity
        self._rows = LoraRows(capacity.slots, context.max_tokens, capacity.max_rank)
        self._own_rows = LoraRows(capacity.slots, context.max_tokens, capacity.max_rank)
        self._made: AdapterStore | None = None
        self._layers: list[LoraLayer] = []
        self._head: LoraLayer | None = None
        self._assigned: tuple[AdapterRows, ...] | None = ()

    def adapt(self, model: nn.Module) -> None:
        """See `CapabilityWorker.adapt`.

        Raises:
            ConfigError: This model does not support adapters.
        """
        context = self._model_context
        if context.skeleton is None:
            raise ConfigError(
                "lora: this model runs through transformers, beside which adapters cannot be "
                "served; `sylvan lora merge` puts one into its checkpoint"
            )
        place = partial(LoraLayer, self._rows, dtype=context.dtype, device=context.device)
        targets = AdapterTargets(model, context.skeleton(), place, _files(context))
        if not targets.layers:
            raise ConfigError("lora: this model has no linear layers that adapters could change")
        if self._made is not None:
            self._made.close()
        capacity = self._capacity
        self._made = AdapterStore(targets, capacity.max_rank, capacity.max_bytes)
        self._layers, self._head = targets.layers, targets.head
        for layer in _layers_of_groups(model):
            layer.rows = self._own_rows

    @property
    def commands(self) -> Mapping[type[ExecutorCommand], Handler]:
        return {LoadAdapter: self._load}

    def read(self, name: str, path: str) -> HostCopy:
        """Read an adapter and store its copy.

        Raises:
            ConfigError: This model cannot serve it, or it is too large.
        """
        return self._store.read(name, path)

    def prepare(self, work: LoraWork) -> None:
        """Apply changes; no step runs now."""
        store = self._store
        store.drop(work.drop)
        store.start(work.load)
        for slot, name in work.slots.items():
            self._fill(slot, store[name])
        if work.rows != self._assigned:
            self._rows.assign([(r.slot, r.start, r.stop) for r in work.rows])
            self._assigned = work.rows
        if not work.rows:
            self._own_rows.assign(())

    def before_forward(self, step: StepContext, work: LoraWork) -> None:
        """Set the rows of adapters; captured graphs have none; draft trees have more rows."""
        step.may_use_graph &= not work.rows
        plan = step.plan
        if step.batch.limits.max_paths and not all(draft.is_chain for draft in plan.drafts):
            place = computed_ends(plan)
            self._rows.assign([(r.slot, place[r.start], place[r.stop]) for r in work.rows])
            self._assigned = None
        if (local := step.batch.local) is not None:
            self._own_rows.select(self._rows, local.rows.numpy())

    def before_head(self, rows: IntArray | torch.Tensor | None) -> None:
        """Set the rows of adapters that change the head."""
        changed = self._head is not None and self._head.is_changed
        self._rows.take(rows if changed else None)

    def after_forward(self, step: StepContext, work: LoraWork) -> Report:
        """Report copies read meanwhile."""
        return self._store.report

    def idle_step(self, work: LoraWork) -> Report:
        """Report copies when the step has nothing else to do."""
        return lambda: self._store.report(_IDLE_WAIT_S)

    def close(self) -> None:
        """Close the store."""
        if self._made is not None:
            self._made.close()

    @property
    def _store(self) -> AdapterStore:
        assert self._made is not None, "`adapt` comes first"
        return self._made

    def _fill(self, slot: int, copy: HostCopy) -> None:
        parts = {id(layer): changed for layer, changed in copy.content}
        for layer in self._layers:
            found = parts.get(id(layer))
            if found is None:
                layer.unload(slot)
            else:
                layer.load(slot, found)

    def _load(self, command: Any) -> dict[str, Any]:
        copy = self.read(command.name, command.path)
        if not command.keep:
            self._store.drop((copy.id,))
        return {"id": copy.id, "rank": copy.rank, "num_bytes": copy.num_bytes}


def _layers_of_groups(model: nn.Module) -> list[LoraLayer]:
    """Layers that compute the rows of this rank's own requests only (`RowGroups`)."""
    attending = [part for part in model.modules() if getattr(part, "row_groups", None) is not None]
    inner = [part for whole in attending for part in whole.modules() if isinstance(part, Linear)]
    return [part.lora for part in inner if part.lora is not None]


def _files(context: ModelContext) -> Callable[[], WeightFiles] | None:
    """Return the model's checkpoint, if it has one."""
    kind = context.load_format
    return None if kind == "dummy" else lambda: open_weights(context.model_dir, kind)
