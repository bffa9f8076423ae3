"""Information about a model, read from its files without loading it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sylvan.kernels.native.cost import OpCost
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import VectorForm
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import WeightReader
from sylvan.runtime.models.config import (
    DTYPE_BYTES,
    ModelConfig,
    kv_bytes_per_token,
    state_bytes,
)
from sylvan.runtime.models.files import open_weights
from sylvan.runtime.models.formats import choose
from sylvan.runtime.models.quantise import weight_bytes
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.utils.json_files import read_json

SaveProgram = Callable[[str, Mapping[str, str | int | float | bool | None]], None]
"""Saves the step program under a name, with facts about the model; call before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModelInfo:
    """Properties of a model that other packages need, known without its weights.

    `runner` is the step runner, empty before the executor is built. `weight_bytes`: of the packed
    matrices once one step program has the whole model; before, and elsewhere, an estimate that
    takes stored quantised tensors as unquantised. `exact`: results are batch-invariant, bit for
    bit. `num_pages` is the size of a KV cache that was sized by profiling a device, else 0;
    `kv_bytes` is the size of all KV groups. `state_bytes` is the size of one of `num_states`
    recurrent states; 0 without recurrent layers. `expert_load` counts the rows of each expert so
    far, by layer name: int64 (E,). `use` returns padding statistics of runners that compile
    functions for step sizes. `save`: None if steps need more than a program.
    """

    architecture: str
    dtype: str
    vocab_size: int
    context_len: int
    num_layers: int
    hidden_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    kv_bytes_per_token: int
    weight_bytes: int
    num_parameters: int
    state_bytes: int = 0
    num_states: int = 0
    generates: bool = True
    causal: bool = True
    reads_all: bool = False  # pooling reads the hidden vectors of all tokens
    num_labels: int = 0
    vector_size: int = 0  # size of an embedding; 0: the model makes none
    forms: tuple[VectorForm, ...] = ()  # kinds of embeddings; the first is the default
    runner: str = ""
    exact: bool = False
    program: Sequence[OpCost] = field(default=(), compare=False)  # ops of a step program
    num_pages: int = 0
    kv_bytes: int = 0
    expert_load: Mapping[str, torch.Tensor] = field(
        default_factory=dict[str, torch.Tensor], compare=False
    )
    use: Callable[[], Mapping[str, float]] | None = field(default=None, compare=False)
    save: SaveProgram | None = field(default=None, compare=False)


def read_facts(
    model_dir: Path,
    dtype: str = "auto",
    quantization: str | None = None,
    *,
    trusted: bool = False,
) -> LoadedModelInfo:
    """Read the configuration files; allocates no weights.

    Args:
        model_dir: The checkpoint.
        dtype: Type of the weights, or "auto".
        quantization: Weight format to quantise to.
        trusted: Whether Python files of the checkpoint may run.

    Raises:
        ConfigError: the model is not supported; the message is one sentence.
    """
    return facts_of(load_config(model_dir, trusted=trusted), model_dir, dtype, quantization)


def facts_of(
    config: ModelConfig, model_dir: Path, dtype: str = "auto", quantization: str | None = None
) -> LoadedModelInfo:
    """As `read_facts`, for a config that has been read already."""
    name = _dtype_name(config, dtype)
    build = Build(dtype=getattr(torch, name), length=1, device=torch.device("meta"))
    model = family_of(config).model(config, build)
    numbers = sum(p.numel() for p in model.parameters())
    return LoadedModelInfo(
        architecture=config.architecture,
        dtype=name,
        vocab_size=config.vocab_size,
        context_len=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        eos_ids=_eos_ids(config, model_dir),
        bos_id=config.bos_id,
        kv_bytes_per_token=kv_bytes_per_token(config, name),
        weight_bytes=weight_bytes(model, choose(config, quantization).loaded, DTYPE_BYTES[name]),
        num_parameters=numbers,
        state_bytes=state_bytes(config, name),
        generates=config.head == "lm",
        causal=config.causal,
        num_labels=config.num_labels,
    )


def check_tensors(config: ModelConfig, model_dir: Path) -> int:
    """Compare names and shapes of a checkpoint's tensors with the model's; return their number.

    Reads headers only.

    Raises:
        ConfigError: a tensor is missing, unexpected, truncated or of another shape; names it.
    """
    build = Build(dtype=torch.float32, length=1, device=torch.device("meta"))
    return WeightReader(family_of(config).model(config, build), open_weights(model_dir)).check()


def _dtype_name(config: ModelConfig, dtype: str) -> str:
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    return name


def _eos_ids(config: ModelConfig, model_dir: Path) -> tuple[int, ...]:
    """Read EOS ids from generation_config.json (it has the end of a chat turn) or config.json."""
    path = model_dir / "generation_config.json"
    try:
        found = read_json(path).get("eos_token_id")
    except FileNotFoundError:
        return config.eos_ids
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    if found is None:
        return config.eos_ids
    ids = found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"{str(path)!r}: eos_token_id must be an id or a list of ids")
    return tuple(ids)
