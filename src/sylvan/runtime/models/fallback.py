"""Any other causal model of the installed transformers, with our paging, cache and batching.

The model's own Python runs on the tokens of all requests laid end to end, with their positions.
Each of its attention calls reaches `paged_attention` here, which stores keys and values in our
pages and attends over them. What a model computes outside of that interface from earlier tokens
(recurrent states, convolutions, biases by distance) would be lost, so such models are refused.

Shapes: T rows, N query heads, K key/value heads, H head dim, D hidden, R rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.kernels.api import AttentionLayer
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, architecture_of, make_config, plain_fields
from sylvan.runtime.models.rope import RopeParams

NAME = "sylvan_paged"
"""How transformers knows our attention."""

_STATE = "sylvan_attention"  # where an attention module finds its `_Layer`
_MEMORYLESS = frozenset({"full_attention", "sliding_attention"})
_HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "is_causal"}
)
_PROBE_TOKENS = 3
_UNTRACEABLE = (
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
"""What code that was not written to be traced may raise."""


@dataclass(frozen=True, slots=True)
class Call:
    """One attention module, as a probe saw it called."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(slots=True)
class _Step:
    """What attention modules share: the batch being computed, or the calls that a probe notes."""

    batch: ForwardBatch | None = None
    calls: list[Call] = field(default_factory=list)
    width: int = 0  # of a head in the pool
    hidden: torch.Tensor | None = None  # set: the base model is to return just this


class _Known:
    """Stands for the output of a base model: hidden vectors, and None for all else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    index: int
    step: _Step


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Find out whether transformers has the model, and what its attention looks like.

    Raises:
        ConfigError: it has none, would need remote code, or keeps memory that we do not page.
    """
    config = _config(raw)
    model, step = _skeleton(config, torch.device("meta"), torch.bfloat16)
    calls = _probe(model, step)
    text = config.get_text_config()
    _check_layers(text, calls)
    widths = {"head_dim": max(max(call.head_dim, call.value_dim) for call in calls)}
    heads = {(call.num_heads, call.num_kv_heads) for call in calls}
    if len({kv for _, kv in heads}) > 1 or len({n for n, _ in heads}) > 1:
        raise ConfigError("its layers differ in how many heads they have")
    num_heads, num_kv_heads = heads.pop()
    sizes = {
        "architecture": architecture_of(raw),
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 1,
        "num_hidden_layers": len(calls),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 2048,
        "rope": RopeParams(),
        "path": "transformers",
    }
    return make_config(plain_fields(raw) | sizes | widths)


class TransformersModel(nn.Module):
    """A causal model of transformers behind the interface of our own."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    inner: Any

    def __init__(self, config: ModelConfig, build: Build) -> None:
        """A skeleton without weights; `load` fills it."""
        super().__init__()
        self._sizes, self._build = config, build
        self.inner, self._step = _skeleton(_config(config.raw), torch.device("meta"), build.dtype)

    def load(self, model_dir: Path) -> None:
        """Let transformers read the weights.

        Raises:
            ConfigError: they do not fit the config.
        """
        import transformers

        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                model_dir,
                dtype=self._build.dtype,
                attn_implementation=NAME,
                local_files_only=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"transformers cannot load {str(model_dir)!r}: {error}") from None
        self.inner = loaded.to(self._build.device).eval()
        names = [call.name for call in _probe(*_skeleton_of(self.inner))]
        self._step = _attach(self.inner, names)
        self._step.width = self._sizes.head_dim

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """The ids: the model embeds by itself."""
        return batch.input_ids_T

    def forward(self, x_T: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        self._step.batch, self._step.hidden = batch, None
        out = self.inner.base_model(
            input_ids=x_T.long()[None],
            position_ids=batch.positions_T.long()[None],
            use_cache=False,
        )
        return out.last_hidden_state[0]

    def head(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits as the model makes them, with its own scales and caps. Shape: (R, V)."""
        self._step.hidden = hidden_RD[None]
        ids = torch.zeros(1, len(hidden_RD), dtype=torch.long, device=hidden_RD.device)
        return self.inner(input_ids=ids, use_cache=False).logits[0].float()


MODEL = TransformersModel


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: (1, heads, T, H) in, (1, T, N, V) out."""
    layer: _Layer = getattr(module, _STATE)
    step = layer.step
    _check_call(module, attention_mask, options)
    shape = Call(layer.name, query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
    if step.batch is None:
        step.calls.append(shape)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    q, k, v = (
        F.pad(x[0].transpose(0, 1), (0, step.width - x.shape[-1])) for x in (query, key, value)
    )
    spec = AttentionLayer(
        index=layer.index,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=step.width,
        scale=shape.head_dim**-0.5 if scaling is None else float(scaling),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    out_TNH = step.batch.attention.run(spec, q, k, v, step.batch)
    return out_TNH[None, :, :, : shape.value_dim], None


def _check_call(module: nn.Module, mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    if mask is not None:
        raise ConfigError("it masks or biases attention in a way of its own")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise ConfigError("its attention is not causal")
    known = _HARMLESS | {"sliding_window", "softcap", "s_aux"}
    for name, option in options.items():
        if name not in known and isinstance(option, torch.Tensor):
            raise ConfigError(f"its attention takes {name!r}, which paged attention does not know")


def _config(raw: dict[str, Any]) -> Any:
    """The config object of transformers.

    Raises:
        ConfigError: transformers is missing or does not know the model.
    """
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise ConfigError("and transformers, which may know it, is not installed") from None
    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        code = " without running code from the checkpoint, which is refused"
        needs = code if raw.get("auto_map") else ""
        raise ConfigError(f"transformers has no model_type {kind!r}{needs}")
    try:
        return CONFIG_MAPPING[kind].from_dict(raw)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"transformers refuses its config.json: {error}") from None


def _skeleton(config: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, _Step]:
    """A model without weights whose attention is ours.

    Raises:
        ConfigError: there is no causal model of this config, or it bypasses the interface.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL

    if type(config) not in CAUSAL:
        raise ConfigError(f"transformers has no causal model of {type(config).__name__}")
    cls: Any = CAUSAL[type(config)]
    if cls._is_stateful:
        raise ConfigError(f"{cls.__name__} keeps recurrent states")
    _register()
    try:
        with device:
            model = cls._from_config(config, attn_implementation=NAME, dtype=dtype)
    except (KeyError, ValueError, ImportError) as error:
        raise ConfigError(f"{cls.__name__} cannot be made with our attention: {error}") from None
    return model.eval(), _attach(model, [name for name, _ in model.named_modules()])


def _skeleton_of(model: Any) -> tuple[Any, _Step]:
    return _skeleton(model.config, torch.device("meta"), torch.bfloat16)


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)


def _attach(model: Any, names: list[str]) -> _Step:
    """Give the modules of these names their place, and let the head be called by itself."""
    step = _Step()
    for index, name in enumerate(names):
        setattr(model.get_submodule(name), _STATE, _Layer(name, index, step))
    base = model.base_model
    base.forward = _bypass(base.forward, step)
    return step


def _bypass(forward: Callable[..., Any], step: _Step) -> Callable[..., Any]:
    """The forward of a base model that only passes on hidden vectors when they are known."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if step.hidden is not None:
            return _Known(step.hidden)
        return forward(*args, **kwargs)

    return run


def _probe(model: Any, step: _Step) -> list[Call]:
    """Run a skeleton on a few tokens and note its attention calls, in order.

    Raises:
        ConfigError: it cannot run that way.
    """
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    positions = torch.zeros_like(ids)
    try:
        out = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
        step.hidden = out.last_hidden_state
        logits = model(input_ids=ids, use_cache=False).logits
        assert logits.shape[:2] == ids.shape
    except _UNTRACEABLE as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ConfigError(f"{type(model).__name__} cannot be traced: {reason}") from None
    if not step.calls:
        raise ConfigError(f"{type(model).__name__} computes attention by itself")
    return step.calls


def _check_layers(text: Any, calls: list[Call]) -> None:
    """Every layer must remember by attention alone, and once."""
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - _MEMORYLESS:
        raise ConfigError(f"it has layers of type {', '.join(sorted(kinds - _MEMORYLESS))}")
    names = [call.name for call in calls]
    if len(set(names)) < len(names):
        raise ConfigError("it runs the same attention several times a token")
    if len(calls) != text.num_hidden_layers:
        raise ConfigError(
            f"only {len(calls)} of its {text.num_hidden_layers} layers use the attention interface"
        )
