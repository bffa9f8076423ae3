"""Architecture parameters, parsed once from a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from sylvan.checkpoints.formats import with_quantization_config
from sylvan.kernels.api import ActivationKind, ClampForm, RouterScores
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.rope import RopeParams, parse_rope
from sylvan.utils.json_files import read_json

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}


class NotNative(ConfigError):  # noqa: N818 - not final: the caller tries transformers
    """A known family has an option that its module does not support; transformers may serve it."""


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts; see `kernels.experts.Routing` and `layers.moe.MoEShape`.

    `layers` are the layers with experts; others have a dense feed-forward. `limit` and
    `shared_limit` (of shared experts) clamp their activations, in the form `clamp`.
    """

    num_experts: int
    top_k: int
    inner: int
    layers: tuple[int, ...]
    scores: RouterScores = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_rank: Literal["best", "best_two"] = "best"
    jitter: float = 0.01
    scale_inputs: bool = False
    shared: int = 0
    shared_gate: bool = False
    correction: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    alpha: float = 1.0
    limit: float | None = None
    shared_limit: float | None = None
    clamp: ClampForm = "gpt_oss"


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of latent attention; see `kernels.latent.LatentShape`.

    `index`: columns of the key of the token indexer, 0 without one.
    """

    q_rank: int | None
    latent: int
    nope: int
    rope_dim: int
    value: int
    index: int = 0

    @property
    def kept(self) -> int:
        """Columns kept per token."""
        return self.latent + self.rope_dim + self.index


class CompressedKV(msgspec.Struct, frozen=True, kw_only=True):
    """Pool layers with compressed entries, each for several tokens, after the layers of attention.

    `columns`: numbers per token; pages hold a multiple of `block` tokens. See
    `sylvan.config.compressed`.
    """

    layers: int
    columns: int
    block: int


class QueryScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Scales late queries by 1 + strength * log(1 + floor((position + shift) / every)).

    Applies to all layers, or to `layers` (Llama 4, Ministral 3). With `log`, the factor is instead
    the logarithm of the length so far to base `every`, at least 1 (Qwen 1).
    """

    every: int
    strength: float
    shift: int = 0
    layers: tuple[int, ...] | None = None
    log: bool = False


class StatePart(msgspec.Struct, frozen=True):
    """One tensor of a request's recurrent state; `exact`: float32 whatever the weights' type."""

    shape: tuple[int, ...]
    exact: bool = False


class BlockDiffusion(msgspec.Struct, frozen=True, kw_only=True):
    """Block diffusion: tokens of a block are predicted in several passes, in any order.

    Attributes:
        block: Tokens of a block; a token sees its own block and all blocks before it.
        mask_id: Token in positions that are not predicted yet.
        whole: Tokens see the whole text, later blocks included; blocks are counted from the start
            of the answer.
        shifted: Logits of a row predict the next position.
        last_time: Time of the last pass; times fall from 1 and determine how many positions each
            pass fills (Dream). 0: all passes fill the same number.
    """

    block: int
    mask_id: int
    whole: bool = False
    shifted: bool = False
    last_time: float = 0.0


class ModelMedia(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs other than text.

    Attributes:
        architecture: The whole model's; `ModelConfig.architecture` is that of the text part.
        token_ids: Placeholder tokens in prompts, by kind of media.
        edited_layers: Layers to whose outputs encoder vectors are added (DeepStack).
        whole: The tokens of an item attend to each other in both directions.
        windows_only: `whole` applies to layers with a window only.
        prefix: All tokens of a prompt attend to each other, with or without items; the maximum
            length of such a prompt (0: they do not).
        cross: Layers attend to encoder vectors; placeholders keep their own embeddings.
        one: A request has one item, and all rows attend to it; else a row attends to the items
            directly before it.
        vector_scale: Factor of encoder vectors, like that of token embeddings.
        decoder_prompt: The item is the prompt itself, and the decoder starts with these tokens, as
            far as config.json says.
        encoder_len: Maximum tokens of the encoder; 0: as many as the decoder.
        dual_encoder: Size of the vector that an item gets in the space shared with texts; no layer
            reads items (0: layers read them).
    """

    architecture: str
    token_ids: dict[str, int]
    edited_layers: tuple[int, ...] = ()
    whole: bool = False
    windows_only: bool = False
    prefix: int = 0
    cross: bool = False
    one: bool = False
    vector_scale: float = 1.0
    decoder_prompt: tuple[int, ...] = ()
    encoder_len: int = 0
    dual_encoder: int = 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that decoder-only models share, with Hugging Face's names; switches have defaults.

    A family file sets the switches that its config.json does not mention. `layer_windows` has one
    entry per layer: the number of newest tokens that it attends to, or None. `attention_layers`
    are the layers with keys and values, None for all; `states` is the recurrent state of the others
    per request. `raw` is config.json as read, for parameters of a single family.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeParams
    dtype: DtypeName = "float32"
    hidden_act: ActivationKind = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    layer_windows: tuple[int | None, ...] = ()
    attention_layers: tuple[int, ...] | None = None
    states: tuple[StatePart, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "whole", "unit"] = ""  # unit: no weights, and only with positions
    qk_norm_last: bool = False  # after rotary positions
    query_scaling: QueryScaling | None = None
    alibi_slopes: tuple[float, ...] = ()  # per head; biases instead of positions
    # layers with positions attend within chunks of this many tokens
    attention_chunk: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True  # of layer norms
    norm_weight: bool = True  # False: norms only scale to length one
    norm_offset: float = 0.0
    gated_mlp: bool = True
    head_bias: bool = False
    rope_interleaved: bool = False
    rope_axes: tuple[int, ...] = ()  # axis (time, height, width) of each angle; empty: one axis
    media: ModelMedia | None = None  # inputs besides text
    diffusion: BlockDiffusion | None = None  # generates block by block, not token by token
    local_rope: RopeParams | None = None  # of layers with a window; None: same as the others
    nope_layers: tuple[int, ...] = ()
    learned_positions: bool = False
    residual_scale: float = 1.0
    sinks: bool = False
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    compressed: CompressedKV | None = None
    path: Literal["native", "transformers"] = "native"
    code: str | None = None  # directory of trusted Python files to run
    causal: bool = True  # False: bidirectional attention, without a KV cache
    # words: masked-LM head of an encoder; weighted: weighted rewards of several aims
    head: Literal["lm", "none", "score", "reward", "weighted", "words"] = "lm"
    num_labels: int = 0  # outputs of a classification head
    token_types: int = 0  # number of segment embeddings
    embedding_size: int = 0  # width of the embedding tables; 0: hidden size
    extra_rows: int = 0  # of the embedding table, for ids that are never generated
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    attention_softcap: float = 0.0
    qkv_limit: float = 0.0  # clamps queries, keys and values before positions; 0: none
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    raw: dict[str, Any] = {}

    @property
    def q_dim(self) -> int:
        """Columns of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Columns of all key heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def table_rows(self) -> int:
        """Rows of the embedding table."""
        return self.vocab_size + self.extra_rows

    @property
    def media_ids(self) -> int:
        """Number of ids that prompts with items may contain."""
        placeholders = self.media.token_ids.values() if self.media is not None else ()
        return max((self.table_rows, *(token + 1 for token in placeholders)))

    def kv_index(self, layer: int) -> int:
        """Index of `layer` among the layers with keys and values."""
        return layer if self.attention_layers is None else self.attention_layers.index(layer)

    @property
    def kv_layers(self) -> int:
        """Number of layers of the KV pool."""
        entries = 0 if self.compressed is None else self.compressed.layers
        if self.attention_layers is None:
            return self.num_hidden_layers + entries
        return len(self.attention_layers) + entries


def read_config(model_dir: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        ConfigError: the directory or file is missing, or the file is not a JSON object.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ConfigError(f"there is no model directory {str(model_dir)!r}")
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"{str(model_dir)!r} has no config.json, so it is not a model") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{str(path)!r} is not a JSON object")
    return with_quantization_config(raw, model_dir)


SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "BailingMoEForCausalLM": "BailingMoeForCausalLM",
        "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
        "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
        "HF_ColBERT": "BertModel",
        "IQuestCoderForCausalLM": "LlamaForCausalLM",
        "QuantMixtralForCausalLM": "MixtralForCausalLM",
        "SarvamMLAForCausalLM": "DeepseekV3ForCausalLM",
        "SarvamMoEForCausalLM": "BailingMoeV2ForCausalLM",
        "TorchNativeLlamaForCausalLM": "LlamaForCausalLM",
        "TorchNativePhi3ForCausalLM": "Phi3ForCausalLM",
    }
)
"""Other names of architectures: older ones, those of other programs, and equal models."""


def architecture_of(raw: dict[str, Any]) -> str:
    """The architecture that config.json names, under its usual name.

    Raises:
        ConfigError: It names none, or several.
    """
    names = raw.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise ConfigError("config.json: architectures must name one model")
    return SPELLINGS.get(names[0], names[0])


def common_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` with the same meaning in every family; family files add theirs.

    Raises:
        ConfigError: rope parameters or the activation are unknown.
    """
    heads = raw.get("num_attention_heads")
    fields = {
        name: raw[name]
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "tie_word_embeddings",
        )
        if raw.get(name) is not None
    }
    fields.setdefault("max_position_embeddings", 2048)
    fields.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and heads > 0 and isinstance(raw.get("hidden_size"), int):
        fields.setdefault("head_dim", raw["hidden_size"] // heads)
    act = raw.get("hidden_act") or raw.get("hidden_activation") or "silu"
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: unknown activation {act!r}; supported are {', '.join(ACTIVATIONS)}"
        )
    return (
        fields
        | plain_fields(raw)
        | {
            "architecture": architecture_of(raw),
            "hidden_act": ACTIVATIONS[act],
            "rope": parse_rope(raw, _positions(fields["max_position_embeddings"])),
        }
    )


def attention_bias(raw: dict[str, Any]) -> dict[str, Any]:
    """Sets the biases of all attention projections from `attention_bias`."""
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias}


def plain_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields that do not depend on the computation."""
    return {
        "dtype": _dtype(raw),
        "eos_ids": _ids(raw.get("eos_token_id")),
        "bos_id": raw.get("bos_token_id"),
        "raw": raw,
    }


def make_config(fields: dict[str, Any]) -> ModelConfig:
    """Build and check a config.

    Raises:
        ConfigError: a field is missing, of the wrong type, or invalid.
    """
    try:
        config = msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from None
    check_config(config)
    if not config.layer_windows:
        config = msgspec.structs.replace(config, layer_windows=(None,) * config.num_hidden_layers)
    return config


_LARGEST_BLOCK = 1024
_LARGEST = {
    "vocab_size": 4_000_000,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 4096,
    "num_attention_heads": 8192,
    "num_key_value_heads": 8192,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 28,
}


def check_config(config: ModelConfig) -> None:
    """Reject impossible shapes.

    Raises:
        ConfigError: names the field and its limit.
    """
    for name, limit in _LARGEST.items():
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise ConfigError(f"config.json: {name} must be in 1..{limit}, it is {value}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"config.json: num_attention_heads ({config.num_attention_heads}) must be a multiple "
            f"of num_key_value_heads ({config.num_key_value_heads})"
        )
    if config.rope.rotary_dim(config.head_dim) % 2:
        raise ConfigError(
            f"config.json: the rotary part of head_dim ({config.head_dim}) must be even"
        )
    if not (math.isfinite(config.rms_norm_eps) and config.rms_norm_eps >= 0):
        raise ConfigError(f"config.json: rms_norm_eps must be >= 0, it is {config.rms_norm_eps}")
    if config.moe is not None:
        _check_moe(config.moe)
    if config.layer_windows and len(config.layer_windows) != config.num_hidden_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(config.layer_windows)} entries for "
            f"{config.num_hidden_layers} layers"
        )
    if any(w is not None and w < 1 for w in config.layer_windows):
        raise ConfigError("config.json: sliding_window must be at least 1")


def _check_moe(moe: MoEConfig) -> None:
    counts = {"experts": moe.num_experts, "experts of a token": moe.top_k, "inner size": moe.inner}
    for what, count in counts.items():
        if count < 1:
            raise ConfigError(f"config.json: the mixture of experts needs at least 1 {what}")
    if moe.top_k > moe.num_experts:
        raise ConfigError(
            f"config.json: {moe.top_k} experts per token, but the model has {moe.num_experts}"
        )
    if moe.groups < 1 or moe.num_experts % moe.groups or not 1 <= moe.kept_groups <= moe.groups:
        raise ConfigError(
            f"config.json: {moe.num_experts} experts cannot be divided into {moe.groups} groups of "
            f"which {moe.kept_groups} are selected"
        )


def block_diffusion(
    raw: dict[str, Any], *, block: int, mask_id: int, **how: bool | float
) -> dict[str, Any]:
    """Return `ModelConfig.diffusion` of a model that generates by block diffusion.

    Args:
        raw: config.json.
        block: Default of `block_size` or `block_length`.
        mask_id: Default of `mask_token_id`.
        how: Other fields of `BlockDiffusion`.
    """
    sizes = (raw.get(name) for name in ("block_size", "block_length"))
    size = next((s for s in sizes if s is not None), block)
    mask = raw.get("mask_token_id")
    mask = mask_id if mask is None else mask
    if not (isinstance(size, int) and 1 <= size <= _LARGEST_BLOCK):
        raise ConfigError(f"config.json: block_size must be in 1..{_LARGEST_BLOCK}, it is {size!r}")
    if not (isinstance(mask, int) and 0 <= mask < raw.get("vocab_size", 0)):
        raise ConfigError(f"config.json: mask_token_id {mask!r} is not in the vocabulary")
    return {"diffusion": {"block": size, "mask_id": mask} | how}


def sliding_windows(raw: dict[str, Any], default_on: bool) -> tuple[int | None, ...]:
    """Window of each layer, from `sliding_window`, `use_sliding_window` and `layer_types`.

    Args:
        raw: config.json.
        default_on: Whether the family applies `sliding_window` by default.
    """
    window, layers = raw.get("sliding_window"), raw.get("num_hidden_layers")
    if not isinstance(layers, int) or window is None:
        return ()
    if not isinstance(window, int):
        raise ConfigError(f"config.json: sliding_window must be an integer, it is {window!r}")
    types = raw.get("layer_types")
    if isinstance(types, list):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if not raw.get("use_sliding_window", default_on):
        return ()
    first = raw.get("max_window_layers", 0) if "use_sliding_window" in raw else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def kv_bytes_per_token(config: ModelConfig, dtype: str | None = None) -> int:
    """Bytes of keys and values per token in all layers; needs no weights."""
    if not config.causal:
        return 0
    per_layer = 2 * config.num_key_value_heads * config.head_dim
    if config.latent is not None:
        per_layer = config.latent.kept
    numbers = config.kv_layers * per_layer
    if config.compressed is not None:
        numbers += config.compressed.layers * (config.compressed.columns - per_layer)
    return numbers * DTYPE_BYTES[dtype or config.dtype]


def state_bytes(config: ModelConfig, dtype: str | None = None) -> int:
    """Bytes of the recurrent state of one request; 0 without recurrent layers."""
    size = DTYPE_BYTES[dtype or config.dtype]
    return sum(math.prod(part.shape) * (4 if part.exact else size) for part in config.states)


def _positions(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"config.json: unsupported dtype {name!r}; supported are {known}")
    return name


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    values: list[object] = list(value) if isinstance(value, list) else [value]
    ids = tuple(v for v in values if isinstance(v, int) and v >= 0)
    if len(ids) < len(values):
        raise ConfigError(f"config.json: eos_token_id must be one id or a list, it is {value!r}")
    return ids
