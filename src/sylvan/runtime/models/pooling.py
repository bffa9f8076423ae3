"""Reads how a checkpoint pools token vectors into one.

Sentence-transformers writes `modules.json`: the model, the pooling of its vectors, and further
modules (a dense layer, a norm, unit length). Without it, the family's default applies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch.nn import functional as F

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import VectorForm
from sylvan.runtime.models import clip, retrieval, siglip
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.token_heads import (
    TokenHeads,
    Transform,
    read_token_heads,
    step_token,
)
from sylvan.utils.json_files import read_json

Mode = Literal["cls", "mean", "last", "max", "weightedmean", "mean_sqrt_len", "splade"]

_OLD_MODES = {
    "cls_token": "cls",
    "lasttoken": "last",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_tokens": "mean",
    "weightedmean_tokens": "weightedmean",
}
_NEW_MODES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}


_PLAIN = TokenHeads()
COLBERT = "HF_ColBERT"
"""BERT with a projection of token vectors, as the original ColBERT code writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingSpec:
    """How the embedding of a text is computed.

    Attributes:
        modes: One or several pooling modes, whose vectors are concatenated; `splade` only alone.
        transforms: Applied to the pooled vector float32 (D,), in order.
        normalize: Whether the vector gets unit length at the end, after truncation.
        size: Dimension of the vector.
        forms: Forms of embeddings that the model can compute; the first is the default.
        tokens: How vectors of single tokens are computed.
    """

    modes: tuple[Mode, ...]
    transforms: tuple[Transform, ...] = ()
    normalize: bool = True
    size: int = 0
    forms: tuple[VectorForm, ...] = ("text",)
    tokens: TokenHeads = _PLAIN

    @property
    def reads_all(self) -> bool:
        """Whether pooling needs the vectors of all tokens, so cached prefixes cannot be used."""
        return self.modes != ("last",)

    @property
    def pools_logits(self) -> bool:
        """Whether logits over the vocabulary are pooled instead of hidden vectors (SPLADE).

        They are log(1 + relu(logit)), maximised over the text (arXiv:2109.10086).
        """
        return self.modes == ("splade",)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingOverride:
    """The operator's choice; None leaves it to the checkpoint."""

    mode: str | None = None
    normalize: bool | None = None


def read_pooling(model_dir: Path, config: ModelConfig, override: PoolingOverride) -> PoolingSpec:
    """Read how a checkpoint pools.

    Raises:
        ConfigError: modules.json is unreadable, or needs an unsupported module.
    """
    if config.num_labels:
        return _of_labels(model_dir, config, override)
    modes: tuple[Mode, ...] = ("last",) if config.causal else ("cls",)
    if config.architecture == "Contriever":
        modes = ("mean",)
    spec = _of_family(model_dir, config) or PoolingSpec(modes=modes)
    if (config.raw.get("architectures") or [""])[0] == COLBERT:
        weight = Checkpoint(model_dir).tensor("linear.weight").float()
        spec = replace(spec, transforms=(lambda x: F.linear(x, weight),))
    path = model_dir / "modules.json"
    if path.is_file():
        spec = _read_modules(model_dir, _read_json(path, list), spec)
    if override.mode is not None:
        spec = replace(spec, modes=(_mode(override.mode),))
    normalize = spec.normalize if override.normalize is None else override.normalize
    if spec.pools_logits:
        wanted = bool(override.normalize)
        return PoolingSpec(modes=spec.modes, normalize=wanted, size=config.vocab_size)
    vector = torch.zeros(config.hidden_size * len(spec.modes))
    for transform in spec.transforms:
        vector = _applied(transform, vector)
    heads = read_token_heads(model_dir, config.hidden_size)
    tokens = TokenHeads(transforms=_by_token(spec)) if heads is None else heads
    return replace(
        spec,
        normalize=normalize,
        size=len(vector),
        forms=_forms(config, weights=heads is not None),
        tokens=replace(tokens, normalize=override.normalize is not False),
    )


def _of_family(model_dir: Path, config: ModelConfig) -> PoolingSpec | None:
    """Pooling of families whose checkpoints do not configure it; None: the default."""
    if retrieval.is_retriever(config):
        return PoolingSpec(modes=("last",), transforms=(retrieval.projection(model_dir),))
    if config.architecture.startswith("Siglip"):
        return PoolingSpec(modes=("last",), transforms=(siglip.text_head(model_dir),))
    if not config.architecture.startswith("CLIP"):
        return None
    found = clip.projection(model_dir)
    return PoolingSpec(modes=("last",), transforms=() if found is None else (found,))


def _forms(config: ModelConfig, *, weights: bool) -> tuple[VectorForm, ...]:
    if retrieval.is_retriever(config):
        return ("tokens",)
    items = config.media is not None and config.media.dual_encoder > 0
    forms: list[VectorForm] = ["text", "tokens"]
    return (*forms, *(["weights"] if weights else ()), *(["item"] if items else ()))


def _of_labels(model_dir: Path, config: ModelConfig, override: PoolingOverride) -> PoolingSpec:
    spec = PoolingSpec(
        modes=(_class_mode(config, override),), normalize=False, size=config.num_labels
    )
    names = config.raw.get("architectures") or ("",)
    if not str(names[0]).endswith("ForProcessRewardModel"):
        return spec
    tokens = TokenHeads(step_token=step_token(model_dir))
    return replace(spec, forms=("steps",), tokens=tokens)


def _by_token(spec: PoolingSpec) -> tuple[Transform, ...]:
    """Transforms of token vectors; none if several poolings are concatenated."""
    return spec.transforms if len(spec.modes) == 1 else ()


def _applied(transform: Transform, vector: torch.Tensor) -> torch.Tensor:
    try:
        return transform(vector)
    except RuntimeError as error:
        raise ConfigError(f"modules.json: its layers do not fit the model: {error}") from None


def _class_mode(config: ModelConfig, override: PoolingOverride) -> Mode:
    if override.mode is not None:
        return _mode(override.mode)
    if config.causal:
        return "last"
    return "mean" if config.raw.get("classifier_pooling") == "mean" else "cls"


def _mode(name: str) -> Mode:
    if name not in get_args(Mode):
        raise ConfigError(f"unknown pooling {name!r}; expected {', '.join(get_args(Mode))}")
    return cast("Mode", name)


def _read_modules(model_dir: Path, entries: list[Any], spec: PoolingSpec) -> PoolingSpec:
    modes, transforms, normalize = spec.modes, list[Transform](), False
    for entry in sorted(entries, key=lambda e: e.get("idx", 0)):
        kind, folder = str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", ""))
        if kind in ("Transformer", "MLMTransformer", "Dropout"):
            continue
        if kind == "Normalize":
            normalize = True
            continue
        made = _inside(model_dir, folder)
        if kind == "Pooling":
            modes = _read_modes(_read_json(made / "config.json", dict))
        elif kind == "SpladePooling":
            modes = _read_splade(_read_json(made / "config.json", dict))
        elif kind == "Dense":
            transforms.append(_dense(made))
        elif kind == "LayerNorm":
            transforms.append(_layer_norm(made))
        else:
            raise ConfigError(f"modules.json names the module {kind!r}, which is not supported")
    return PoolingSpec(modes=modes, transforms=tuple(transforms), normalize=normalize)


def _inside(model_dir: Path, folder: str) -> Path:
    """A folder of the checkpoint; rejects paths outside of it."""
    made = (model_dir / folder).resolve()
    if not made.is_relative_to(model_dir.resolve()):
        raise ConfigError(f"modules.json names {folder!r}, which is outside of the model directory")
    return made


def _read_modes(raw: dict[str, Any]) -> tuple[Mode, ...]:
    found = raw.get("pooling_mode")
    if found is not None:
        names = [str(name) for name in (found if isinstance(found, list) else [found])]
    else:
        prefix = "pooling_mode_"
        on = [name.removeprefix(prefix) for name in raw if name.startswith(prefix) and raw[name]]
        names = [_OLD_MODES.get(name, name) for name in on]
    if not names:
        raise ConfigError("modules.json: the pooling config enables no pooling mode")
    return tuple(_mode(_NEW_MODES.get(name, name)) for name in names)


def _read_splade(raw: dict[str, Any]) -> tuple[Mode, ...]:
    for name, default in (("pooling_strategy", "max"), ("activation_function", "relu")):
        if raw.get(name, default) != default:
            raise ConfigError(f"modules.json: SpladePooling with {name} {raw[name]!r}")
    return ("splade",)


_ACTIVATIONS: dict[str, Transform] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


def _dense(folder: Path) -> Transform:
    raw = _read_json(folder / "config.json", dict)
    name = str(raw.get("activation_function", "Tanh")).rpartition(".")[2].removesuffix("()")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"modules.json: a dense layer with the activation {name!r}")
    act, tensors = _ACTIVATIONS[name], _tensors(folder)
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    return lambda x: act(F.linear(x, weight, bias))


def _layer_norm(folder: Path) -> Transform:
    tensors = _tensors(folder)
    weight, bias = tensors["norm.weight"], tensors["norm.bias"]
    return lambda x: F.layer_norm(x, weight.shape, weight, bias)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.tensor(name).float() for name in checkpoint.tensors}


def _read_json(path: Path, kind: type) -> Any:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(found, kind):
        raise ConfigError(f"{str(path)!r} must be a JSON {kind.__name__}")
    return found
