"""One step as the model sees it: flat arrays over all requests, the KV pool, the attention backend.

Shapes: T tokens of this step, R requests of this step, P pages of the longest request, S request
slots (rows of a page table), G groups of layers with pages of their own, N query heads, K key/value
heads, H head dim.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch

from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope, X
from sylvan.kernels.scan.device_spans import DeviceSpans
from sylvan.kernels.scan.spans import Spans
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.host import BatchLimits, HostArrays
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.core.states import StatePool, StateWork
from sylvan.runtime.core.step import DraftRows, InputEmbeds


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCaps:
    """Features of a backend; config checks and `auto` use these instead of its name.

    `batch_invariant`: the bits of a query do not depend on the other queries of the step, on any
    machine. Backends that call PyTorch or cuBLAS, which choose kernels by shape, or that have a
    separate decode kernel, cannot promise this. `row_ends`: rows may see later tokens
    (`ForwardBatch.row_ends`). `variants`: it computes `chunk` and `slopes` of a layer;
    `biases`, `blocks`: it also computes these. `runners`: step runners that it works with.
    `kv_dtypes`: values of `cache.dtype` that it reads; `dtypes` and `max_head_dim`: what it
    computes with; None: anything. `from_projection`: it is a `FusedAttention`. `kv_scales`: it
    stores and reads by the scales of a layer.
    """

    devices: frozenset[str]
    page_sizes: frozenset[int] | None = None  # None: any
    batch_invariant: bool = False
    tree_mask: bool = False
    row_ends: bool = False
    variants: bool = False
    biases: bool = False
    blocks: bool = False
    graph_capture: bool = False
    runners: frozenset[str] = frozenset({"eager"})
    kv_dtypes: frozenset[str] = frozenset({"model"})
    dtypes: frozenset[str] | None = None
    max_head_dim: int | None = None
    from_projection: bool = False
    kv_scales: bool = False


class KVCachePool(Protocol):
    """Memory for keys and values in pages; page 0 takes the writes of padding rows.

    Layers form KV groups, each with its own pages, page table and page numbers.

    `page_size` is the same for all groups.
    """

    page_size: int

    @property
    def groups(self) -> Sequence[PageMemory]:
        """The bytes of each group; at least one."""
        ...

    @property
    def layer_groups(self) -> Sequence[int]:
        """The group of each attention layer, by its index."""
        ...

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (num_pages, page_size, K, H) and values (num_pages, page_size, K, V) of a layer."""
        ...

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Write keys and values of tokens at `slots_T` (page * page_size + offset)."""
        ...

    def move(self, group: int, sources_N: IntArray, targets_N: IntArray) -> None:
        """Copy the entries at slots `sources_N` to slots `targets_N` of a KV group.

        A slot is page * page_size + offset. All sources are read before any target is written.
        """
        ...


class AttentionBackend(Protocol):
    """Paged attention: `plan` once per step, then `run` once per layer, in layer order."""

    caps: ClassVar[AttentionCaps]

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare what all layers of this step share."""
        ...

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Store k and v in the pool, then let each query attend to its own request's keys.

        Returns: (T, N, spec.value_dim), owned by the caller.
        """
        ...


class FusedAttention(AttentionBackend, Protocol):
    """A backend that also applies head norms and rotary positions."""

    def run_fused(
        self,
        spec: AttentionLayer,
        qkv: torch.Tensor,
        rope: Rope | None,
        norms: tuple[HeadNorm | None, HeadNorm | None],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Like `run`, but from the rows of the fused projection, (T, (N + 2 K) H)."""
        ...


class RotaryAttention(AttentionBackend, Protocol):
    """A backend that also rotates queries and keys by a given table."""

    def run_rotated(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
        table_TR: torch.Tensor,
    ) -> torch.Tensor:
        """Like `run`, but first rotate queries and keys by a float32 table with a row for each.

        A row has cosines, then sines; see `Rope`.
        """
        ...


@dataclass(slots=True, eq=False)
class CrossMemory:
    """Encoder output of a media item, for cross-attention layers.

    Attributes:
        vectors_ND: The encoder's output vectors.
        layers: Keys and values (heads, N, columns) by layer, computed by the first step that needs
            them.
    """

    vectors_ND: torch.Tensor
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class CrossAttentionRecorder:
    """Records the attention weights of a request in chosen heads of cross-attention layers.

    Attributes:
        heads: The heads to record, by layer.
        num_vectors: Number of the item's vectors that count, from the first on.
        weights: Weights of each slice in order, by layer: float32 (heads, rows, num_vectors); rows
            sum to 1.
    """

    heads: Mapping[int, tuple[int, ...]]
    num_vectors: int
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def record(self, layer: int, q_TNH: torch.Tensor, k_NSH: torch.Tensor, scale: float) -> None:
        """Record a slice's weights in one layer, from its queries and the item's keys."""
        chosen = list(self.heads.get(layer, ()))
        if chosen:
            q_NTH = q_TNH[:, chosen].float().transpose(0, 1)
            scores_NTS = q_NTH @ k_NSH[chosen, : self.num_vectors].float().mT * scale
            self.weights.setdefault(layer, []).append(scores_NTS.softmax(-1))


@dataclass(frozen=True, slots=True)
class CrossSpan:
    """Rows of a step that attend to the vectors of these items; `recorder` gets their weights."""

    rows: slice
    memories: tuple[CrossMemory, ...]
    recorder: CrossAttentionRecorder | None = None


@dataclass(frozen=True, slots=True)
class RowVectors:
    """`InputEmbeds` in device memory."""

    row: int
    layer: int
    vectors_ND: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEdits:
    """Changes by capabilities in one step that is queued on a device.

    Attributes:
        vectors: Vectors that replace embeddings, or are added to the outputs of layers.
        ends_T: `ForwardBatch.row_ends` on the device; None: causal.
        cross: `ForwardBatch.cross`.
    """

    vectors: tuple[RowVectors, ...] = ()
    ends_T: torch.Tensor | None = None
    cross: tuple[CrossSpan, ...] = ()


NO_EDITS = StepEdits()


@dataclass(frozen=True, slots=True)
class LocalRows:
    """The requests of a step whose KV this rank holds (attention data parallelism).

    Attributes:
        batch: A batch of these requests only, for attention layers; samples nothing.
        rows: Rows of these requests in the whole step, int64.
        max_rows: Largest number of rows of a group of ranks.
        places_T: Index of each row of the step in the gathered rows of all groups, which are padded
            to `max_rows` each; int64.
    """

    batch: ForwardBatch
    rows: torch.Tensor
    max_rows: int
    places_T: torch.Tensor


class ForwardBatch:
    """Inputs of one forward pass: persistent buffers that a step updates in place.

    `host` has the numpy arrays. Tensors with shape suffixes are views of the part used by this
    step; on the CPU they alias `host`, elsewhere `ready` copies it to the device.

    Request r has rows q_starts_R[r] to q_starts_R[r + 1] of the T rows, and kv_lens_R[r] tokens
    with KV once these rows are stored. Its pages are page_tables[g][req_slots_R[r]], where g is the
    layer's KV group; slot_mappings[g] (T,) are the slots in which layers of the group store the
    rows. q_starts_R has R + 1 entries.

    Attributes:
        sample_rows: Rows that need logits, (S,).
        states: Recurrent states, in models with recurrent layers.
        state_work: This step's work on the recurrent states.
        state_spans: The same in device memory, for captured graphs.
        input_embeds: Vectors that replace token embeddings.
        drafts: Slices whose last rows are draft tokens.
        rotary_positions: Positions of the rows, (T,), if they differ from the default.
        row_ends: Each row attends to tokens of its request before its end, (T,), and at least up to
            itself; None: causal.
        cross: Rows that attend to media items in cross-attention layers.
        edits: Edits of the step that runs. On a device with queued steps, the host fields may
            already belong to a later step.
        local: The requests that this rank attends for; None: all of them.
    """

    def __init__(
        self,
        limits: BatchLimits,
        kv: KVCachePool,
        attention: AttentionBackend,
        device: torch.device | str = "cpu",
        states: StatePool | None = None,
        host: HostArrays | None = None,
    ) -> None:
        """`host`: existing arrays to use, contents included; None: allocate new ones."""
        self.limits = limits
        self.kv = kv
        self.attention = attention
        self.states = states
        self.state_work: StateWork | None = None
        self.state_spans: DeviceSpans | None = None
        self.input_embeds: tuple[InputEmbeds, ...] = ()
        self.rotary_positions: IntArray | None = None
        self.row_ends: IntArray | None = None
        self.cross: tuple[CrossSpan, ...] = ()
        self.edits: StepEdits | None = None
        self.drafts: tuple[DraftRows, ...] = ()
        self.local: LocalRows | None = None
        self.host = host or HostArrays(limits, len(kv.groups))
        self.num_tokens = 0
        self.num_reqs = 0
        self.num_samples = 0
        self._device = torch.device(device)
        self._host = {name: torch.from_numpy(array) for name, array in vars(self.host).items()}
        self._full = {name: tensor.to(self._device) for name, tensor in self._host.items()}
        self.page_tables = self._full["page_tables"]
        self.slot_mappings = self._full["slot_mappings"]
        self.ready(0, 0, 0)

    def plan_attention(self) -> None:
        """Let the attention backend plan for the rows that this rank attends for, if any."""
        attending = self if self.local is None else self.local.batch
        if attending.num_tokens:
            self.attention.plan(attending)

    @property
    def page_table_SP(self) -> torch.Tensor:  # noqa: N802 - named as the tensors are
        """The page table of the first group."""
        return self.page_tables[0]

    @property
    def spans(self) -> Spans:
        """Rows and state slots of the step, for recurrent layers; in a graph this waits."""
        if self.state_spans is not None:
            return self.state_spans.on_host()
        work = self.state_work
        assert work is not None, "a step without states"
        starts = self.q_starts_R
        on_host = starts.tolist() if starts.device.type == "cpu" else self.host.q_starts.tolist()
        return Spans(tuple(on_host[: len(starts)]), tuple(work.slots.tolist()), work.saves)

    def table_of(self, layer: int) -> torch.Tensor:
        """The page table (S, P) of an attention layer, by its index."""
        return self.page_tables[self.kv.layer_groups[layer]]

    def slots_of(self, layer: int) -> torch.Tensor:
        """The slots (T,) in which an attention layer stores the rows, by its index."""
        return self.slot_mappings[self.kv.layer_groups[layer]]

    def ready(self, num_tokens: int, num_reqs: int, num_samples: int) -> None:
        """Mark `host` as filled for that many rows, requests and samples; update the views."""
        self.num_tokens, self.num_reqs, self.num_samples = num_tokens, num_reqs, num_samples
        counts = {
            "input_ids": num_tokens,
            "positions": num_tokens,
            "token_types": num_tokens,
            "kv_lens": num_reqs,
            "q_starts": num_reqs + 1,
            "req_slots": num_reqs,
            "sample_rows": num_samples,
        }
        host, full = self._host, self._full
        if self._device.type != "cpu":
            for name, count in counts.items():
                full[name][:count].copy_(host[name][:count], non_blocking=True)
            full["page_tables"].copy_(host["page_tables"], non_blocking=True)
            for mine, given in zip(full["slot_mappings"], host["slot_mappings"], strict=True):
                mine[:num_tokens].copy_(given[:num_tokens], non_blocking=True)
        self.input_ids_T = full["input_ids"][:num_tokens]
        self.positions_T = full["positions"][:num_tokens]
        self.token_types_T = full["token_types"][:num_tokens]
        self.slot_mappings = full["slot_mappings"][:, :num_tokens]
        self.kv_lens_R = full["kv_lens"][:num_reqs]
        self.q_starts_R = full["q_starts"][: num_reqs + 1]
        self.req_slots_R = full["req_slots"][:num_reqs]
        self.sample_rows = full["sample_rows"][:num_samples]

    def ends(self, layer: AttentionLayer) -> torch.Tensor | None:
        """`row_ends` on the device, (T,), if `layer` uses them; None: causal."""
        if not layer.row_ends:
            return None
        if self.edits is not None:
            return self.edits.ends_T
        if self.row_ends is None:
            return None
        return torch.from_numpy(self.row_ends).to(self.positions_T.device)

    @property
    def memories(self) -> tuple[CrossSpan, ...]:
        """`cross` of the step that runs; see `edits`."""
        return self.cross if self.edits is None else self.edits.cross

    def vectors(self, layer: int, like_TD: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows and their `input_embeds` for a layer, in the type of `like_TD`."""
        if self.edits is not None:
            parts = [(p.row, p.vectors_ND) for p in self.edits.vectors if p.layer == layer]
        else:
            host = (part for part in self.input_embeds if part.layer == layer)
            parts = [(part.row, torch.from_numpy(part.vectors)) for part in host]
        for row, vectors_ND in parts:
            yield slice(row, row + len(vectors_ND)), vectors_ND.to(like_TD)

    def edited(self, layer: int, x_TD: X) -> X:
        """Add the `input_embeds` of a layer to its output, in place; return the output."""
        assert isinstance(x_TD, torch.Tensor)
        for rows, vectors_ND in self.vectors(layer, x_TD):
            x_TD[rows] += vectors_ND
        return x_TD

    def part(self, rows: torch.Tensor, reqs: torch.Tensor) -> ForwardBatch:
        """A sub-batch of this step: equally many consecutive rows of each of `reqs`.

        Later rows of these requests are not included. Large buffers are shared, not copied.
        """
        some = copy.copy(self)
        each = len(rows) // len(reqs)
        some.num_tokens, some.num_reqs = len(rows), len(reqs)
        some.input_ids_T, some.positions_T = self.input_ids_T[rows], self.positions_T[rows]
        some.slot_mappings = self.slot_mappings[:, rows]
        if self.row_ends is not None:
            some.row_ends = self.row_ends[rows.cpu().numpy()]
        if self.edits is not None and self.edits.ends_T is not None:
            some.edits = replace(self.edits, ends_T=self.edits.ends_T[rows])
        some.req_slots_R = self.req_slots_R[reqs]
        some.kv_lens_R = some.positions_T[each - 1 :: each] + 1
        some.q_starts_R = torch.arange(len(reqs) + 1, device=rows.device) * each
        return some
