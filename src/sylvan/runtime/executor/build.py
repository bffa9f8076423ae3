"""From a model directory to an executor that serves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime import attention as attention_backends
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.local import LocalExecutor
from sylvan.runtime.executor.runner import EagerRunner
from sylvan.runtime.executor.worker import Worker
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import Progress, dummy_weights, load_weights
from sylvan.runtime.models.config import DTYPE_BYTES, ModelConfig, kv_bytes_per_token
from sylvan.runtime.models.registry import load_config, load_family
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.runtime.sampling.processors import GrammarMasks, LogitsProcessor
from sylvan.runtime.sampling.sampler import Sampler
from sylvan.utils import plugins

RunnerName = Literal["auto", "eager", "program"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """How to serve a model in this process.

    `num_pages` counts page 0, which takes the writes of padding rows. `context_len` None is what
    the model was made for. `load_format` "dummy" fills in seeded random weights.
    """

    page_size: int
    num_pages: int
    max_batch_tokens: int
    max_running_reqs: int
    context_len: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    attention: str = "auto"
    runner: RunnerName = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    overlap: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParts:
    """What features add to sampling."""

    masks: GrammarMasks | None = None
    custom: Sequence[LogitsProcessor] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the rest of the system wants to know of a model; found without its weights."""

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


def read_facts(model_dir: Path, dtype: str = "auto") -> ModelFacts:
    """Facts from the configuration files alone; allocates nothing.

    Raises:
        ConfigError: the model cannot be served; one clear sentence.
    """
    return facts_of(load_config(model_dir), model_dir, dtype)


def facts_of(config: ModelConfig, model_dir: Path, dtype: str = "auto") -> ModelFacts:
    """The same for a config that has been read already."""
    name = _dtype_name(config, dtype)
    build = Build(dtype=getattr(torch, name), length=1, device=torch.device("meta"))
    model = load_family(config.architecture).model(config, build)
    numbers = sum(p.numel() for p in model.parameters())
    return ModelFacts(
        architecture=config.architecture,
        dtype=name,
        vocab_size=config.vocab_size,
        context_len=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        eos_ids=_eos_ids(config, model_dir),
        bos_id=config.bos_id,
        kv_bytes_per_token=kv_bytes_per_token(config, name),
        weight_bytes=numbers * DTYPE_BYTES[name],
        num_parameters=numbers,
    )


def build_executor(
    model_dir: Path,
    options: LocalOptions,
    *,
    progress: Progress | None = None,
    sampling: SamplingParts | None = None,
) -> tuple[LocalExecutor, ModelFacts]:
    """Load a model and make the executor that runs it.

    Raises:
        ConfigError: the model or an option cannot be served; one clear sentence.
    """
    config = load_config(model_dir)
    facts = facts_of(config, model_dir, options.dtype)
    dtype, device = getattr(torch, facts.dtype), torch.device(options.device)
    context = options.context_len or facts.context_len
    model = load_family(config.architecture).model(
        config, Build(dtype=dtype, length=context, device=device)
    )
    if options.load_format == "dummy":
        dummy_weights(model, options.seed)
    else:
        load_weights(model, model_dir, progress)
    limits = BatchLimits(
        max_tokens=options.max_batch_tokens,
        max_reqs=options.max_running_reqs,
        max_pages_per_req=-(-(context + 1) // options.page_size),
    )
    pool = MHAPool(_kv_shape(config, options), dtype, device)
    batch = ForwardBatch(limits, pool, load_attention(options.attention, device), device)
    parts = sampling or SamplingParts()
    worker = Worker(
        EagerRunner(model), batch, Sampler(parts.masks, parts.custom), config.vocab_size
    )
    caps = ExecutorCaps(
        max_batch_tokens=options.max_batch_tokens, max_running_reqs=options.max_running_reqs
    )
    return LocalExecutor(worker, caps, overlap=options.overlap), facts


def load_attention(name: str, device: torch.device) -> Any:
    """Make a backend by its name; `auto` takes the fused one of PyTorch.

    Raises:
        ConfigError: there is none of that name, or not for this device.
    """
    backend = plugins.load(attention_backends, "torch_cpu" if name == "auto" else name).BACKEND
    if device.type not in backend.caps.devices:
        raise ConfigError(f"the attention backend {name!r} does not run on {device.type}")
    return backend()


def _kv_shape(config: ModelConfig, options: LocalOptions) -> KVShape:
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_pages=options.num_pages,
        page_size=options.page_size,
    )


def _dtype_name(config: ModelConfig, dtype: str) -> str:
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    return name


def _eos_ids(config: ModelConfig, model_dir: Path) -> tuple[int, ...]:
    """Of generation_config.json, which knows the chat's end of turn; else of config.json."""
    path = model_dir / "generation_config.json"
    try:
        found = json.loads(path.read_text("utf-8")).get("eos_token_id")
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
