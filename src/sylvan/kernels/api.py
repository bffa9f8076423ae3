"""The interface between ops, layers and tracers: traced tensors, attention, routing and weights.

A model's forward is plain Python over the functions of `sylvan.kernels.ops`. Called with torch
tensors they compute; called with a `TracedTensor` they ask its tracer to emit the op, and nothing
runs. That is how a forward becomes a program that one native call runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from sylvan.kernels.adapters import LoraLayer

Dtype = Literal["f32", "bf16", "i32"]
Rows = Literal["tokens", "outputs"]
RouterScores = Literal["softmax", "softmax_chosen", "sigmoid", "sqrt_softplus", "sparsemixer"]
ClampForm = Literal["gpt_oss", "inputs", "outputs"]
ActivationKind = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu"
]


class Unsupported(Exception):  # noqa: N818 - not an error: the caller falls back to PyTorch
    """A tracer does not support an op or a shape; the message names it, for the operator."""


class Communicator(Protocol):
    """A group of ranks: processes (or threads) that call the same collectives in the same order.

    Every method raises RankLostError if another rank has exited or times out.
    """

    rank: int
    size: int

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack the tensors of all ranks, which have the same shape: (...) -> (size, ...)."""
        ...

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Send part r to rank r; part r of the result comes from rank r. Shape: (size, ...)."""
        ...

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The float32 sum of all ranks' x, as by `collective.tree_sum`; a new tensor."""
        ...

    def check(self) -> None:
        """Raise RankLostError if a collective within a native program has failed."""
        ...

    def close(self) -> None:
        """Leave the group; idempotent."""
        ...


class DispatchedRows(NamedTuple):
    """Rows that came to this rank for its experts (R rows, K experts of a row, D columns).

    Attributes:
        x_RD: The rows; there may be room for more than came, which holds anything.
        ids_RK: int64: places of experts on this rank; -1: on another rank, or no row.
        weights_RK: Their routing weights, float32; 0 where there is no expert.
        handle: For `RowDispatcher.combine`.
    """

    x_RD: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    handle: Any


class RowDispatcher(Protocol):
    """Sends rows to the ranks of their experts, and the sums of outputs back to the rows' ranks."""

    def reserve(self, columns: int, top_k: int, dtype: torch.dtype) -> None:
        """Get memory for rows of a layer; all ranks call this for the same layers in one order.

        Raises:
            ConfigError: such rows cannot be sent.
        """
        ...

    def dispatch(
        self, x_TD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor, num_slots: int
    ) -> DispatchedRows:
        """Send each row once to each rank that has some of its experts.

        All ranks pass different rows, as many each.

        Args:
            x_TD: The rows.
            slots_TK: Their experts by slot, int64; rank r has the r-th share of slots. -1: none.
            weights_TK: Routing weights, float32.
            num_slots: Slots of all ranks.
        """
        ...

    def combine(self, sums_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        """Add up the sums of all ranks that got a row, in their order. Shape: (T, D)."""
        ...


@dataclass(frozen=True, slots=True)
class RowParts:
    """Rows divided among the ranks of a group in parts of equal length.

    Parts may repeat: key heads that several ranks hold count equally often on every rank.
    """

    ranks: Communicator


class LinearWeight(Protocol):
    """A matrix (out, in) that `linear` multiplies by: a torch tensor or a quantised weight."""

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KVScales:
    """Calibrated scales of a layer's e4m3 keys and values, from the checkpoint.

    A value is its code times the scale of its head. Shapes: float32 (K,).
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPattern:
    """Which blocks of `size` tokens a row attends to (Phi-3-small).

    These are its own block and the `near` - 1 blocks before it, and those earlier blocks whose
    number plus the head's shift is a multiple of `stride`. `first_head`: first head of this rank.
    """

    size: int
    near: int
    stride: int
    step: int
    first_head: int = 0

    @property
    def dense(self) -> int:
        """Maximum length at which every row sees all earlier tokens."""
        return self.size * self.near

    def shifts(self, heads: int) -> list[int]:
        """Return the shift of each head of this rank."""
        return [(self.first_head + head) * self.step + 1 for head in range(heads)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayer:
    """Definition of an attention layer; constant over the life of a model.

    `window`: a token sees itself and the `window - 1` before it; None sees all before it. Without
    `causal`, the window also covers later tokens. `kv_scales`: for pages of e4m3.
    `softcap`: scores become `softcap * tanh(score / softcap)`. `sinks`: one logit per query head
    that takes part in the softmax but carries no value. `chunk`, `slopes` and `biases` are
    those of an `AttentionVariant`; they and `blocks` are set only for backends that compute them.
    Without `row_ends` the layer ignores `ForwardBatch.row_ends` and stays causal.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    row_ends: bool = True
    v_head_dim: int | None = None
    chunk: int | None = None
    slopes: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    blocks: BlockPattern | None = None
    kv_scales: KVScales | None = None

    @property
    def value_dim(self) -> int:
        """Columns of a value head."""
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions as a table, so that every scaling rule is the same op.

    `cos_sin`: float32 (positions, rotary_dim), row p is cos of rotary_dim/2 angles, then sin. The
    first `rotary_dim` columns of each head are rotated, the rest pass through. Column i is paired
    with i + rotary_dim/2, or with its neighbour where `interleaved`.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionVariant:
    """Attention features of few families.

    `chunk`: tokens attend within chunks of this many tokens. `query_scales`: float32 (positions,),
    factors of the rotated queries. `norm_last`: heads are normed after rotation, not before.
    `slopes`: float32 (N,), subtracted from a head's scores per token of distance (ALiBi).
    `biases`: (N D,), added to the scores of each head at distances 0 to D - 1; the last one also
    applies to greater distances (T5).
    """

    chunk: int | None = None
    query_scales: torch.Tensor | None = None
    norm_last: bool = False
    slopes: torch.Tensor | None = None
    biases: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query or key head before rotation: `weight` (head_dim,) plus `offset`.

    A longer weight norms all heads together; `over` then says which ranks hold the other heads.
    """

    weight: torch.Tensor
    eps: float
    offset: float = 0.0
    over: RowParts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Routing: how experts are selected.

    `scores`: softmax over all experts, softmax over the selected ones, sigmoid of each, the square
    root of softplus of each, or SparseMixer. `groups` of experts are ranked first (by the best
    expert, or the sum of the two best), and only experts of the best `kept_groups` are eligible.
    `bias` changes the selection only. `scale_inputs`: the weight scales the expert's input, not its
    output (Llama 4). `ids` (T, K): the experts of each row, if not scores select them; `by_token`
    (V, K): the experts of each token ID, which a program looks up for its rows.
    """

    top_k: int
    scores: RouterScores = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_rank: Literal["best", "best_two"] = "best"
    bias: torch.Tensor | None = None
    jitter: float = 0.01  # SparseMixer: largest relative distance to the best score that counts
    scale_inputs: bool = False
    ids: torch.Tensor | None = None
    by_token: LinearWeight | None = None

    @property
    def has_kernels(self) -> bool:
        """Whether kernels support this routing, besides the reference."""
        return self.ids is None and self.scores != "sqrt_softplus"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertRanks:
    """How the experts of a layer are divided among ranks that all have the rows of a step.

    Consecutive ranks form `groups`. A group has `per_group` slots with one expert each, whose
    columns its ranks share. An expert may have slots in several groups; rows alternate among them.

    Attributes:
        ranks: All ranks.
        groups: Number of groups.
        per_group: Slots per group; the slots of group g begin at g * per_group.
        slots_EC: int32 (E, C) on the model's device: the slots of each expert, repeated up to C.
            Rebalancing changes the numbers between steps.
        all_to_all: Whether each output goes to one rank, which sums it (`experts.exchange`).
        dispatcher: Sends an equal share of the rows from each rank to the ranks of their experts;
            None: each rank takes the rows of its experts from those that it has.
    """

    ranks: Communicator
    groups: int
    per_group: int
    slots_EC: torch.Tensor
    all_to_all: bool = False
    dispatcher: RowDispatcher | None = None

    @property
    def num_slots(self) -> int:
        """Slots of all groups."""
        return self.groups * self.per_group

    @property
    def width(self) -> int:
        """Number of ranks in a group."""
        return self.ranks.size // self.groups

    @property
    def first_slot(self) -> int:
        """First slot of this rank's group."""
        return self.ranks.rank // self.width * self.per_group

    def slots(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The slot that computes each pair. Shape: int64 (T, K)."""
        table = self.slots_EC.to(ids_TK.device)
        turns = torch.arange(len(ids_TK), device=ids_TK.device) % table.shape[1]
        return table[ids_TK.long(), turns[:, None]].long()

    def dispatch(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The expert of this rank that computes each pair; -1: another rank does. Shape: (T, K)."""
        held = self.slots(ids_TK) - self.first_slot
        return torch.where((held >= 0) & (held < self.per_group), held, -1)

    def combine(self, outputs_PD: torch.Tensor, pairs: torch.Tensor, count: int) -> torch.Tensor:
        """Gather the outputs of all pairs from all ranks, in float32.

        Args:
            outputs_PD: Outputs of this rank's pairs.
            pairs: Indices of these pairs, int64.
            count: Number of all pairs.
        """
        every = outputs_PD.new_zeros(count, outputs_PD.shape[-1], dtype=torch.float32)
        every[pairs] = outputs_PD.float()
        return self.ranks.all_sum(every)


class Clamping(NamedTuple):
    """Clamps both factors of act(gate) * up to `limit`; gates are clamped from above only.

    Attributes:
        limit: The limit, which may be infinite.
        form: Clamps before the activation (`inputs`: DeepSeek V4) or after it (`outputs`: Step
            3.5); `gpt_oss`: before it, and the product is (up + 1) gate sigmoid(alpha gate).
        alpha: The alpha of `gpt_oss`.
    """

    limit: float
    form: ClampForm
    alpha: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """The stacked matrices of the experts that this rank holds: E experts, D hidden, F inner.

    `lora` holds the adapters of `gate_up` and `down`. `expert_ranks` says which ranks hold the
    other experts; None: this rank holds all.
    """

    gate_up: LinearWeight  # (E, 2 F, D), gate then up
    down: LinearWeight  # (E, D, F)
    gate_up_bias: LinearWeight | None = None  # (E, 2 F), never quantised
    down_bias: LinearWeight | None = None  # (E, D)
    act: ActivationKind = "silu"
    clamping: Clamping | None = None
    lora: tuple[LoraLayer, LoraLayer] | None = None
    expert_ranks: ExpertRanks | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer, over all ranks."""
        return self.down.shape[0] if self.expert_ranks is None else len(self.expert_ranks.slots_EC)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Columns of a query head (`nope`, then `rope_dim` rotated ones), a value head and a latent."""

    num_heads: int
    nope: int
    rope_dim: int
    value: int
    latent: int


@dataclass(frozen=True, slots=True)
class LatentParts:
    """Constants of a layer: `up` (N (nope + value), latent) expands latents to keys and values.

    `query_scales`: see `AttentionVariant`.
    """

    shape: LatentShape
    up: LinearWeight
    norm: HeadNorm  # of the latent columns (kv_lora_rank)
    rope: Rope | None  # of the rotated columns (qk_rope_head_dim); None: nothing is rotated
    query_scales: torch.Tensor | None = None


HostFunction = Callable[[torch.Tensor, Any], torch.Tensor]
"""A Python function that a program calls: from rows (T, D) and a context to rows (T, D)."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedTensor:
    """A matrix that will exist when the program runs: `rows` x `cols` of `dtype`.

    `id` is the tracer's number of the storage. Each of `rows` stands for `times` rows.
    """

    tracer: Tracer
    id: int
    cols: int
    dtype: Dtype
    rows: Rows = "tokens"
    times: int = 1

    def __post_init__(self) -> None:
        assert self.cols > 0

    @property
    def shape(self) -> tuple[int, int]:
        """(-1, cols): the number of rows is known only when the program runs."""
        return (-1, self.cols)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"{name} of a traced tensor")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Reject functions that are not ops of `sylvan.kernels.ops`."""
        raise Unsupported(f"torch.{getattr(func, '__name__', func)} of a traced tensor")

    def _refuse(self, *args: object) -> Any:
        raise Unsupported("arithmetic on a traced tensor")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __getitem__ = __neg__ = __matmul__ = _refuse


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IndexedRows:
    """Outputs of a sparse-attention indexer for the rows of a step, before rotary positions.

    Attributes:
        q: Queries of its H heads of I columns, (T, H I).
        k: Keys, (T, I).
        weights: Head weights, float32 (T, H).
        top_k: Number of tokens selected for a row.
        interleaved: The two columns of a rotary pair are adjacent.
    """

    q: TracedTensor
    k: TracedTensor
    weights: TracedTensor
    top_k: int
    interleaved: bool = False


X = TypeVar("X", torch.Tensor, TracedTensor)


class Tracer(Protocol):
    """Emits ops instead of running them. Arguments as in `sylvan.kernels.ops`.

    Raises:
        Unsupported: from any method, when the op or its shapes cannot be traced.
    """

    def embedding(
        self, ids: TracedTensor, weight: LinearWeight, scale: float, part_from: int | None
    ) -> TracedTensor:
        """`ids` is the batch's ids or positions."""
        ...

    def rms_norm(
        self,
        x: TracedTensor,
        weight: torch.Tensor,
        eps: float,
        residual: TracedTensor | None,
        offset: float,
    ) -> tuple[TracedTensor, TracedTensor]: ...

    def layer_norm(
        self,
        x: TracedTensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: TracedTensor | None,
    ) -> tuple[TracedTensor, TracedTensor]: ...

    def linear(
        self,
        x: TracedTensor,
        weight: LinearWeight,
        bias: torch.Tensor | None,
        out_f32: bool,
        parts: int = 1,
    ) -> TracedTensor: ...

    def lora(self, x: TracedTensor, y: TracedTensor, layer: LoraLayer) -> TracedTensor: ...

    def lora_embedding(self, ids: TracedTensor, y: TracedTensor, layer: LoraLayer) -> TracedTensor:
        """`ids` is the batch's ids."""
        ...

    def glu(
        self, gate_up: TracedTensor, kind: ActivationKind, clamping: Clamping | None
    ) -> TracedTensor: ...

    def activation(self, x: TracedTensor, kind: ActivationKind) -> TracedTensor: ...

    def attention(
        self,
        qkv: TracedTensor,
        layer: AttentionLayer,
        rope: Rope | None,
        norms: tuple[HeadNorm | None, HeadNorm | None],
        variant: AttentionVariant | None,
    ) -> TracedTensor: ...

    def latent_attention(
        self, q: TracedTensor, kv: TracedTensor, parts: LatentParts, layer: AttentionLayer
    ) -> TracedTensor: ...

    def sparse_attention(
        self,
        q: TracedTensor,
        kv: TracedTensor,
        parts: LatentParts,
        layer: AttentionLayer,
        index: IndexedRows | TracedTensor,
    ) -> tuple[TracedTensor, TracedTensor]:
        """As `ops.sparse_latent_attention`."""
        ...

    def all_reduce(
        self,
        x: TracedTensor,
        ranks: Communicator,
        bias: torch.Tensor | None,
        like: TracedTensor,
    ) -> TracedTensor: ...

    def all_gather(self, x: TracedTensor, ranks: Communicator, cols: int) -> TracedTensor:
        """As `ops.all_gather`, for float32 rows."""
        ...

    def xielu(self, x: TracedTensor, numbers: Sequence[torch.Tensor]) -> TracedTensor:
        """As `ops.xielu`; `numbers` are its parameters, in the same order."""
        ...

    def host_call(self, x: TracedTensor, call: HostFunction) -> TracedTensor:
        """Call Python while the program runs; it returns rows of the same shape as x."""
        ...

    def take_rows(self, x: TracedTensor, rows: TracedTensor) -> TracedTensor:
        """`rows` is the batch's sample rows."""
        ...

    def add(self, a: TracedTensor, b: TracedTensor, scale: float) -> TracedTensor: ...

    def cast(self, x: TracedTensor) -> TracedTensor:
        """The rows in the model's dtype. See `ops.cast`."""
        ...

    def scale(self, x: TracedTensor, factor: float) -> TracedTensor: ...

    def softcap(self, x: TracedTensor, cap: float) -> TracedTensor: ...

    def clamp(self, x: TracedTensor, limit: float) -> TracedTensor: ...

    def scale_rows(self, x: TracedTensor, factors: TracedTensor) -> TracedTensor: ...

    def experts(
        self,
        x: TracedTensor,
        logits: TracedTensor,
        routing: Routing,
        weights: ExpertWeights,
        load: torch.Tensor | None,
    ) -> TracedTensor: ...
