"""Builds transformers models without weights, with our attention, then probes and checks them.

Every attention call of such a model goes to `paged_attention`, which stores keys and values in our
pages and attends over them.

Shapes: B requests, L tokens of each, T rows of all, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels.api import AttentionLayer
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch, RotaryAttention
from sylvan.runtime.models.config import StatePart
from sylvan.runtime.models.recurrent import ProbeCache, StateKey

NAME = "sylvan_paged"
"""Name under which our attention is registered in transformers."""

_STATE = "sylvan_attention"  # attribute with an attention module's `_Layer`
_ATTENDING = frozenset({"full_attention", "sliding_attention"})
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
_MEMORYLESS = frozenset({"mlp", "moe", "sparse", "dense"})
_HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "is_causal"}
)
_KNOWN = _HARMLESS | {"sliding_window", "softcap", "s_aux"}
_PROBE_TOKENS = 3
_STACKED = 3  # dimensions of a stack of matrices
_CACHE_NAMES = ("cache_params", "cache", "past_key_values")  # the last one until transformers 5.23
NO_CACHE: Mapping[str, Any] = MappingProxyType({"use_cache": False})
UNTRACEABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that untraceable code may raise."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """An attention call that a probe recorded."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class RotaryCall:
    """Asks attention to rotate heads by `table_TR`: cosines, then sines, of each row."""

    query: torch.Tensor
    key: torch.Tensor
    table_TR: torch.Tensor


@dataclass(slots=True)
class AttentionStep:
    """State shared by attention modules: the current batch, or the recorded calls of a probe."""

    batch: ForwardBatch | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    # The inputs of each call of a pass, and their meaning.
    specs: dict[int, tuple[tuple[Any, ...], AttentionLayer]] = field(default_factory=dict)
    done: int = 0  # calls of this pass: the same module may be called several times
    width: int = 0  # head width in the pool
    groups: int = 0  # key heads in the pool; layers with fewer repeat them
    ends_in_windows: bool = False  # only layers with a window apply `ForwardBatch.row_ends`
    hidden: torch.Tensor | None = None  # set: the base model returns just this
    rotary: RotaryCall | None = None  # rotation for the next call
    # This pass's cosines, sines and `RotaryCall`, by id of the cosines.
    tables: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = field(
        default_factory=dict
    )

    def begin(self, batch: ForwardBatch | None) -> None:
        """Start a pass over these rows; None ends it."""
        self.batch, self.done, self.rotary = batch, 0, None
        self.tables.clear()


class _Known:
    """Replaces a base model's output: hidden vectors, and None for everything else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    step: AttentionStep


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe: attention calls in order, and states of recurrent layers.

    `chosen`: by name, for modules with weight stacks, how many experts each row selects.
    """

    calls: list[AttentionCall]
    states: Mapping[StateKey, StatePart]
    chosen: Mapping[str, int]


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with transformers' signature: (B, heads, L, H) in, (B, L, N, V) out."""
    layer: _Layer = getattr(module, _STATE)
    step, about = layer.step, (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
    _check_call(module, attention_mask, options)
    if step.batch is None:
        step.calls.append(AttentionCall(layer.name, *about, options.get("sliding_window")))
        return query.transpose(1, 2).new_zeros(*_rows(query).shape[:-1], about[-1]), None
    q, k, v = _rows(query).flatten(0, 1), _rows(key).flatten(0, 1), _rows(value).flatten(0, 1)
    if not about[-2] == about[-1] == step.width:
        q, k, v = (_padded(x, step.width) for x in (q, k, v))
    if step.groups > about[1]:
        k, v = (x.repeat_interleave(step.groups // about[1], 1) for x in (k, v))
    spec = _spec(step, about, scaling, options)
    step.done += 1
    if step.rotary is None:
        out_TNH = step.batch.attention.run(spec, q, k, v, step.batch)
    else:
        out_TNH = _rotated(step, spec, (q, k, v), (query, key))
    if about[-1] != step.width:
        out_TNH = out_TNH[:, :, : about[-1]]
    return out_TNH.view(query.shape[0], query.shape[2], about[0], about[-1]), None


def _rotated(
    step: AttentionStep,
    spec: AttentionLayer,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Attention over queries and keys that are not rotated yet."""
    call, step.rotary = step.rotary, None
    assert call is not None
    assert step.batch is not None
    if call.query is not given[0] or call.key is not given[1]:
        raise RuntimeError("queries or keys changed between the rotary call and attention")
    attention = cast("RotaryAttention", step.batch.attention)
    return attention.run_rotated(spec, *heads, step.batch, call.table_TR)


def _spec(
    step: AttentionStep,
    about: tuple[int, int, int, int],
    scaling: float | None,
    options: dict[str, Any],
) -> AttentionLayer:
    """The spec of the next call: that of the previous pass, unless something changed."""
    given = (*about, scaling, options.get("sliding_window"), options.get("softcap"))
    sinks = options.get("s_aux")
    known = step.specs.get(step.done)
    if known is None or known[0] != given or known[1].sinks is not sinks:
        spec = AttentionLayer(
            index=step.done,
            num_heads=about[0],
            num_kv_heads=max(step.groups, about[1]),
            head_dim=step.width,
            scale=about[2] ** -0.5 if scaling is None else float(scaling),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=sinks,
            row_ends=not (step.ends_in_windows and options.get("sliding_window") is None),
        )
        known = step.specs[step.done] = given, spec
    return known[1]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(B, heads, L, H) -> (B, L, heads, H)."""
    return x.transpose(1, 2)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the columns of each head with zeros; returns `x` itself if nothing is missing."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _check_call(module: nn.Module, mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    if mask is not None:
        raise ConfigError("it masks or biases attention in a way of its own")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise ConfigError("its attention is not causal")
    for name in options.keys() - _KNOWN:
        if isinstance(options[name], torch.Tensor):
            raise ConfigError(f"its attention takes {name!r}, which paged attention lacks")


def skeleton(cls: Any, config: Any, dtype: torch.dtype) -> tuple[Any, AttentionStep]:
    """Build a model of the class `cls` without weights, with our attention.

    Raises:
        ConfigError: it bypasses the attention interface, or rejects this config.
    """
    _register()
    try:
        with torch.device("meta"):
            model = cls._from_config(config, attn_implementation=NAME, dtype=dtype)
    except (*UNTRACEABLE, ImportError) as error:  # third-party code and configs may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{cls.__name__} cannot be made with our attention: {reason}") from None
    return model.eval(), attach(model, [name for name, _ in model.named_modules()])


def skeleton_of(model: Any) -> tuple[Any, AttentionStep]:
    """`skeleton` for a model that already has its weights."""
    return skeleton(type(model), model.config, torch.bfloat16)


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)


def attach(model: Any, names: list[str]) -> AttentionStep:
    """Attach our attention to the named modules, and let the head be called separately."""
    step = AttentionStep()
    for name in names:
        setattr(model.get_submodule(name), _STATE, _Layer(name, step))
    base = called(model)
    for part in (base, getattr(base, "decoder", None)):  # some heads call that part itself
        if isinstance(part, nn.Module):
            part.forward = _bypass(part.forward, step)
    if not _takes_positions(base) and hasattr(base, "embed_positions"):
        base.embed_positions.forward = _with_batch_positions(base.embed_positions.forward, step)
    return step


def _takes_positions(base: Any) -> bool:
    return "position_ids" in inspect.signature(type(base).forward).parameters


def _with_batch_positions(forward: Callable[..., Any], step: AttentionStep) -> Callable[..., Any]:
    """Wrap a position table's forward to use the batch's positions, which models cannot pass."""

    def run(*args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if step.batch is not None:
            position_ids = step.batch.positions_T.long()
        return forward(*args, position_ids=position_ids, **kwargs)

    return run


def first_position(model: Any) -> int:
    """The first position: RoBERTa and similar models count from after the padding id."""
    for module in called(model).modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(module.padding_idx) + 1
    return 0


def _bypass(forward: Callable[..., Any], step: AttentionStep) -> Callable[..., Any]:
    """Wrap a base model's forward to return hidden vectors that are already known."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if step.hidden is not None:
            return _Known(step.hidden)
        return forward(*args, **kwargs)

    return run


def called(model: Any) -> Any:
    """The part of a causal model that computes hidden vectors."""
    base = model.base_model
    return base.decoder if type(base).__name__.endswith("DecoderWrapper") else base


def cache_name(model: Any) -> str:
    """Name of the argument that takes a model's cache."""
    names = inspect.signature(type(called(model)).forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), _CACHE_NAMES[-1])


def probe(model: Any, step: AttentionStep) -> ProbeResult:
    """Run a skeleton on a few tokens; return its attention calls, in order, and its states.

    Raises:
        ConfigError: it cannot run this way.
    """
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    positions = torch.zeros_like(ids)
    cache = ProbeCache()
    recurrent = is_stateful(model) or _kinds(model.config.get_text_config()) & _RECURRENT
    memory = {cache_name(model): cache, "use_cache": True} if recurrent else NO_CACHE
    try:
        with _choices(model) as chosen:
            out = called(model)(input_ids=ids, position_ids=positions, **memory)
        step.hidden, attending = out.last_hidden_state, len(step.calls)
        logits = model(input_ids=ids, use_cache=False).logits
        assert logits.shape[:2] == ids.shape
        assert len(step.calls) == attending, "its head computes the layers again"
    except UNTRACEABLE as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ConfigError(f"{type(model).__name__} cannot be traced: {reason}") from None
    if recurrent and not cache.states:
        raise ConfigError(f"{type(model).__name__} keeps recurrent states in a way of its own")
    if not step.calls and not cache.states:
        raise ConfigError(f"{type(model).__name__} computes attention by itself")
    base = called(model)
    if not (cache.states or _takes_positions(base) or hasattr(base, "embed_positions")):
        raise ConfigError(f"{type(model).__name__} counts positions by itself")
    return ProbeResult(step.calls, cache.states, chosen)


@contextmanager
def _choices(model: Any) -> Iterator[dict[str, int]]:
    """Context that records the calls of modules with weight stacks; see `ProbeResult.chosen`."""
    found: dict[str, int] = {}
    hooks = [
        module.register_forward_pre_hook(_noting(name, found), with_kwargs=True)
        for name, module in model.named_modules()
        if any(parameter.dim() == _STACKED for parameter in module.parameters(recurse=False))
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _noting(name: str, found: dict[str, int]) -> Callable[..., None]:
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Tensor) and given.dtype in (torch.int64, torch.int32):
                found[name] = given.shape[-1]

    return note


def is_stateful(model: Any) -> bool:
    """Whether transformers declares that the model keeps more than keys and values."""
    return bool(getattr(type(model), "_is_stateful", False))


def _kinds(text: Any) -> set[str]:
    return set(getattr(text, "layer_types", None) or ())


def check_layers(text: Any, found: ProbeResult) -> None:
    """Check that every layer's memory is our attention's or a state that we keep."""
    kinds = getattr(text, "layer_types", None) or ()
    if unknown := set(kinds) - _ATTENDING - _RECURRENT - _MEMORYLESS:
        raise ConfigError(f"it has layers of type {', '.join(sorted(unknown))}")
    with_state = {layer for _, layer, _ in found.states}
    for layer, kind in enumerate(kinds):
        if kind in _RECURRENT and layer not in with_state:
            raise ConfigError(f"its layer {layer}, of type {kind}, keeps its state by itself")
    attending = len({call.name for call in found.calls})
    stateless = [kind for kind in kinds if kind in _MEMORYLESS]
    count = getattr(text, "decoder_layers", None) or text.num_hidden_layers
    looping = len(found.calls) == count  # each call has its own keys and values
    if not with_state and not looping and attending + len(stateless) != count:
        raise ConfigError(f"only {attending} of its {count} layers use the attention interface")
