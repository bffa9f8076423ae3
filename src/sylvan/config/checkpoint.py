"""Locates a model and reads its size from its files; reads no weights."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from sylvan.checkpoints.code import UNTRUSTED, load_class, named_class
from sylvan.checkpoints.formats import (
    PT_WEIGHTS,
    WeightFormat,
    weight_format,
    with_quantization_config,
)
from sylvan.checkpoints.gguf.view import gguf_file, gguf_view, read_index
from sylvan.checkpoints.headers import read_header
from sylvan.checkpoints.remote import Progress, fetch, is_remote
from sylvan.config.compressed import MODEL_TYPE, CompressedLayout, compressed_layout
from sylvan.config.env import cache_dir
from sylvan.config.facts import DTYPE_BYTES, GGUF, GGUF_BITS, GGUF_DEVICE_BITS, CheckpointInfo
from sylvan.config.recurrent import attending_and_state
from sylvan.config.tasks import is_causal, ordinary, tasks_of
from sylvan.config.tree import BUILT_IN_MODELS
from sylvan.protocol.errors import ConfigError
from sylvan.utils.json_files import read_json

ASSETS = Path(__file__).parent.parent / "assets"
NEEDED = "config.json, *.safetensors and tokenizer.json"
_COMPRESSED = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "youtu", "minicpm3"),
        *("deepseek_v32", "glm_moe_dsa", "longcat_flash", "mistral4", "kimi_linear"),
    }
)
_OLD_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": (
        *("n_head", "n_heads", "num_heads"),
        *("attention_heads", "decoder_attention_heads"),
    ),
    "max_position_embeddings": (
        *("n_positions", "max_seq_len", "model_max_length"),
        "context_length",
    ),
    "head_dim": ("attention_head_dim",),
}
"""Names of sizes in the configs of GPT-2, GPT-Neo, MPT, XGLM, BART, Zamba2 and others."""
_FORMS = (
    (list, "a list", ("architectures", "layer_types", "layers_block_type")),
    (
        dict,
        "an object",
        ("rope_scaling", "rope_parameters", "quantization_config", "auto_map", "text_config"),
    ),
)
_TEXTS = ("text_config", "language_config", "llm_config")  # of models that see or hear
_NEEDED_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
_SIZES = (
    *(*_NEEDED_SIZES, "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings"),
)


def model_dir(model: str) -> Path:
    """The directory of a model given by path, by URL, or by the name of a built-in one.

    Remote models are downloaded first; a GGUF file is represented by a directory in the cache.

    Raises:
        ConfigError: there is none; suggests near names, and says what a model directory contains.
    """
    if model in BUILT_IN_MODELS and not Path(model, "config.json").is_file():
        return ASSETS / model
    path = fetched(model)
    if file := gguf_file(path):
        return gguf_view(file, cache_dir() / "gguf")
    if not path.is_dir():
        raise ConfigError(
            f"model: there is no directory {model!r}{_near(path)}. A model is a directory with "
            f"{NEEDED}, a GGUF file, a URL of either ({_url(model)}, s3://..., https://...), or "
            f"a built-in one ({', '.join(BUILT_IN_MODELS)})"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model: {model!r} has no config.json; a model directory holds {NEEDED}"
            f"{_models_inside(path)}"
        )
    return path


def fetched(model: str, progress: Progress | None = None) -> Path:
    """The local path of a model or tokenizer given by path or URL, downloaded if necessary.

    Raises:
        ConfigError: it is remote and cannot be downloaded.
    """
    if not is_remote(model):
        return Path(model).expanduser()
    return fetch(model, cache_dir() / "models", progress)


def model_facts(model: str, *, trusted: bool = False) -> CheckpointInfo:
    """Size and limits of a checkpoint, from config.json and the headers of its weights.

    Args:
        model: Path, URL or name of the model.
        trusted: Whether Python files of the checkpoint may run, if sizes are missing.

    Raises:
        ConfigError: there is no such model, or its files are unreadable.
    """
    path = model_dir(model)
    config = ordinary(_completed(_read_config(path), path, trusted=trusted))
    kinds = len(config.get("layers_block_type") or ()) or None  # Nemotron-H lists only this
    layers, hidden = _number(config, "num_hidden_layers", kinds), _number(config, "hidden_size")
    attending, state = attending_and_state(config, layers)
    attending *= _passes(config)
    heads = _number(config, "num_attention_heads", None if attending else 1)
    kv_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", hidden // heads)
    inner, vocab = _number(config, "intermediate_size", 4 * hidden), _number(config, "vocab_size")
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    linear = layers * (attention + 3 * hidden * inner)
    weights = weight_format(path)
    matrix_bits, device_matrix_bits = _gguf_bits(path) if weights == "gguf" else (0.0, 0.0)
    packed = _stored_bits(config.get("quantization_config") or {"bits": 4})
    stored = sum(_stored_sizes(path, weights, DTYPE_BYTES[_dtype(config)], packed))
    kept = attending * _kept(config, 2 * kv_heads * head_dim) if is_causal(config) else 0
    windows, entries = _layer_windows(config, attending), 0
    if compressed := _compressed(config):
        kept, entries = compressed.numbers, compressed.entry_numbers
        windows, state = (compressed.window,) * attending, compressed.state_numbers
    return CheckpointInfo(
        name=model,
        context_len=_number(config, "max_position_embeddings", 2048),
        vocab_size=vocab,
        dtype=_dtype(config),
        num_params=stored or linear + 2 * vocab * hidden,
        num_linear_params=min(linear, stored) if stored else linear,
        kv_per_token=max(1, kept),
        head_dim=_head_dim(config, head_dim),
        layer_windows=windows,
        kv_entries=entries,
        state_numbers=state,
        work_per_token=4 * hidden + 3 * inner + 2 * head_dim * (heads + 2 * kv_heads),
        quantization=GGUF if matrix_bits else _stored_quantization(config),
        matrix_bits=matrix_bits,
        device_matrix_bits=device_matrix_bits,
        weights=weights,
        tasks=tasks_of(config, path),
        causal=is_causal(config),
        num_layers=layers,
    )


def vocabulary_rows(path: Path) -> int | None:
    """Number of vocabulary rows of the model in a directory; None if config.json does not say."""
    rows = _read_config(path).get("vocab_size")
    return rows if isinstance(rows, int) else None


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model: {file} is not a JSON object")
    whole = with_quantization_config(cast("dict[str, Any]", config), path)
    inside = whole.get("vlm_config")  # a retriever
    outer = cast("dict[str, Any]", inside) if isinstance(inside, dict) else whole
    nested = next((outer[name] for name in _TEXTS if name in outer), None)
    used = cast("dict[str, Any]", nested) if isinstance(nested, dict) else whole
    for part in (whole, used):
        _check_forms(part)
    named = whole.get("architectures")  # the task of the whole model
    return used | ({"architectures": named} if named else {})


def _check_forms(config: dict[str, Any]) -> None:
    """Reject fields of the wrong type that several readers use."""
    for kind, what, names in _FORMS:
        for name in names:
            value = config.get(name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"model: config.json: {name} must be {what}, is {value!r:.80}")


def _completed(config: dict[str, Any], path: Path, *, trusted: bool) -> dict[str, Any]:
    """Add sizes that only the checkpoint's Python code defines, by other names or by default."""
    named = named_class(config, "AutoConfig")
    there = {
        name: value
        for name in _SIZES
        if (value := _first(config, (name, *_OLD_NAMES.get(name, ())))) is not None
    }
    lacking = next((name for name in _NEEDED_SIZES if name not in there), None)
    if named is None or lacking is None:
        return config
    if not trusted:
        raise ConfigError(
            f"model: config.json leaves {lacking} to Python code of the checkpoint ({named}), "
            f"{UNTRUSTED}"
        )
    known = load_class(path, named).from_dict(config)
    found = {name: getattr(known, name, None) for name in _SIZES if name not in there}
    return config | {name: value for name, value in found.items() if value is not None}


def _first(config: dict[str, Any], names: Iterable[str]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _kept(config: dict[str, Any], ordinary: int) -> int:
    """Numbers that a layer stores per token.

    DeepSeek's latent attention stores one compressed vector; other kinds are stored uncompressed.
    """
    if not isinstance(config.get("kv_lora_rank"), int):
        return ordinary
    rope_dim = _number(config, "qk_rope_head_dim", 64)
    if str(config.get("model_type")) in _COMPRESSED:
        index = config.get("index_head_dim")
        return _number(config, "kv_lora_rank") + rope_dim + (index if isinstance(index, int) else 0)
    head = _number(config, "qk_nope_head_dim", 128) + rope_dim
    return 2 * _number(config, "num_attention_heads") * head


def _passes(config: dict[str, Any]) -> int:
    """How often all layers run (Nanbeige); each time they keep keys and values of their own."""
    weights = config.get("loop_loss_weights")
    if isinstance(weights, list) and weights:
        return len(cast("list[object]", weights)) + 1
    return _number(config, "num_loops", 1)


def _compressed(config: dict[str, Any]) -> CompressedLayout | None:
    """Layout of the KV of compressed attention; None: the model has none."""
    return compressed_layout(config) if config.get("model_type") == MODEL_TYPE else None


def _head_dim(config: dict[str, Any], ordinary: int) -> int:
    """Columns of a query-key product; in latent attention wider than a head."""
    if not isinstance(config.get("kv_lora_rank"), int):
        return ordinary
    rope_dim = _number(config, "qk_rope_head_dim", 64)
    if str(config.get("model_type")) in _COMPRESSED:
        return _number(config, "kv_lora_rank") + rope_dim
    return _number(config, "qk_nope_head_dim", 128) + rope_dim


def _layer_windows(config: dict[str, Any], attending: int) -> tuple[int | None, ...]:
    """Windows of the layers with keys and values, in order; empty if config.json has none."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if not isinstance(kinds, list) or not isinstance(window, int) or window < 1:
        return ()
    names = [str(name) for name in cast("list[object]", kinds)]
    seen = {"full_attention": None, "sliding_attention": window}
    found = tuple(seen[name] for name in names if name in seen)
    return found if len(found) == attending and any(found) else ()


def _number(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _first(config, (name, *_OLD_NAMES.get(name, ())))
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model: config.json: {name} must be a positive integer, is {value!r}")
    return value


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    name = name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"model: config.json: unsupported dtype {name!r}; there is {known}")
    return name


def _stored_quantization(config: dict[str, Any]) -> str | None:
    """Name by the fewest bits of any group of layers; the loader decides if it is supported."""
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return None
    stored = cast("dict[str, Any]", found)
    if stored.get("quant_method") == "mxfp4":  # dequantised while loading
        return None
    return "w4a8" if _stored_bits(stored) <= _FEW_BITS else "w8a8"


_FEW_BITS = 4  # fewer bits are stored as 4


def _gguf_bits(path: Path) -> tuple[float, float]:
    """Mean bits of a number in the quantised matrices of a GGUF file, on CPUs and other devices.

    0 if there are none.
    """
    counts = Counter[str]()
    for tensor in read_index(path)["tensors"]:
        counts[tensor["type"]] += math.prod(tensor["shape"])
    kept = {name: count for name, count in counts.items() if name in GGUF_BITS}
    numbers = max(1, sum(kept.values()))
    on_cpus, elsewhere = (
        sum(bits[name] * count for name, count in kept.items()) / numbers
        for bits in (GGUF_BITS, GGUF_DEVICE_BITS)
    )
    return on_cpus, elsewhere


def _stored_bits(settings: dict[str, Any]) -> int:
    """Bits of most matrices, by `quantization_config`."""
    said = json.dumps(settings)
    if settings.get("load_in_4bit") or any(words in said for words in _FOUR_BITS):
        return 4
    inner = re.search(r'"nbits": (\d+)', said)  # HQQ nests them
    bits = int(inner[1]) if inner else settings.get("bits", settings.get("w_bit"))
    return bits if isinstance(bits, int) and bits > 0 else 8


_FOUR_BITS = (
    *('"quant_algo": "NVFP4"', '"num_bits": 4', '"dtype": "fp4"'),
    *('"_type": "Int4WeightOnlyConfig"', '"_type": "Float8DynamicActivationInt4WeightConfig"'),
)
_DESCRIBING = (
    *(".weight_scale", ".weight_shape", "_scales", ".weight_scale_inv", ".weight_scale_2"),
    *(".weight_zero_point", ".weight_global_scale", ".qzeros", ".scales", ".biases", ".g_idx"),
    *("absmax", ".quant_map", ".nested_quant_map", "__nf4", "__fp4", ".SCB", ".weight_format"),
    *("._weight_scale", "._weight_zero_point"),
)
_PACKED = (".weight_packed", ".qweight", "_blocks", ".W_q")
_BITS = {"I32": 32, "U32": 32, "U8": 8}


def _stored_sizes(
    path: Path, weights: WeightFormat | None, number: int, bits: int
) -> Iterable[int]:
    """Number of elements of every stored tensor; of quantised ones without scales and zero points.

    Pickles are not opened: their tensors are assumed to have `number` bytes per element, and packed
    words `bits`.
    """
    if weights == "gguf":
        yield from (math.prod(entry["shape"]) for entry in read_index(path)["tensors"])
    elif weights == "pt":
        yield from (file.stat().st_size // number for file in path.glob(PT_WEIGHTS))
    for file in sorted(path.glob("*.safetensors")):
        for name, entry in read_header(file)[0].items():
            if not name.endswith(_DESCRIBING):
                packed = name.endswith(_PACKED) or entry.dtype == "U32"
                packed = packed or (entry.dtype == "U8" and bits < 8)
                words = _BITS.get(entry.dtype, bits) // bits if packed else 1
                yield words * math.prod(entry.shape)


def _url(model: str) -> str:
    """The URL of the model that has such a name on a hub."""
    return f"hf://{model}" if re.fullmatch(r"[\w.-]+/[\w.-]+", model) else "hf://..."


def _near(path: Path) -> str:
    """Suggest the most similar directory next to the missing one."""
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    names = [entry.name for entry in _children(parent)]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {str(parent / close[0])!r}?)" if close else ""


def _models_inside(path: Path) -> str:
    inside = [str(entry) for entry in _children(path) if (entry / "config.json").is_file()]
    return f" (did you mean {inside[0]!r}?)" if inside else ""


def _children(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []
