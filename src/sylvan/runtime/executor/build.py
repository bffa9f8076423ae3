"""From a model directory to an executor that serves it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.protocol.errors import ConfigError
from sylvan.runtime import attention as attention_backends
from sylvan.runtime.attention.native import NativeAttention
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import AttentionBackend, BatchLimits, ForwardBatch, KVCachePool
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.executor.local import LocalExecutor
from sylvan.runtime.executor.pooling import Pooler
from sylvan.runtime.executor.runner import EagerRunner, GraphRunner
from sylvan.runtime.executor.worker import Worker
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import (
    Progress,
    defer_weights,
    dummy_weights,
    load_weights,
)
from sylvan.runtime.models.compressed import Formats, choose
from sylvan.runtime.models.config import (
    DTYPE_BYTES,
    ModelConfig,
    kv_bytes_per_token,
    state_bytes,
)
from sylvan.runtime.models.pooling import PoolingSpec, PoolingWish, read_pooling
from sylvan.runtime.models.quantise import weight_bytes
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.runtime.pool.none import NoPool
from sylvan.runtime.pool.states import TensorStates
from sylvan.runtime.sampling.constraints import Constraints
from sylvan.runtime.sampling.processors import LogitsProcessor
from sylvan.runtime.sampling.sampler import Sampler
from sylvan.utils import plugins

logger = logging.getLogger(__name__)

RunnerName = Literal["auto", "eager", "program"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """How to serve a model in this process.

    `num_pages` counts page 0, which takes the writes of padding rows. `context_len` None is what
    the model was made for. `load_format` "dummy" fills in seeded random weights. `num_states` are
    the slots of recurrent state, the empty slot 0 included, of models that have any; 0: enough for
    all running requests, and as many again for cached prefixes. `quantization` is the name of a
    format that matrices are rounded to while loading; None: as the checkpoint has them.
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
    quantization: str | None = None
    overlap: bool = False
    num_states: int = 0
    embed: PoolingWish | None = None  # set: vectors are made, also by a model that generates
    headless: bool = False  # the head of a model that generates is left out
    threads: int = 0  # of the step program; 0: as many as torch uses
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParts:
    """What features add to sampling."""

    constraints: Constraints | None = None
    custom: Sequence[LogitsProcessor] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the rest of the system wants to know of a model; found without its weights.

    `runner` is how steps are run; empty as long as nothing was built. `state_bytes` is the size of
    one of `num_states` recurrent states; 0 where all layers attend.
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
    num_labels: int = 0
    vector_size: int = 0  # numbers of an embedding; 0: none are made
    runner: str = ""


def read_facts(model_dir: Path, dtype: str = "auto", quantization: str | None = None) -> ModelFacts:
    """Facts from the configuration files alone; allocates nothing.

    Raises:
        ConfigError: the model cannot be served; one clear sentence.
    """
    return facts_of(load_config(model_dir), model_dir, dtype, quantization)


def facts_of(
    config: ModelConfig, model_dir: Path, dtype: str = "auto", quantization: str | None = None
) -> ModelFacts:
    """The same for a config that has been read already."""
    name = _dtype_name(config, dtype)
    build = Build(dtype=getattr(torch, name), length=1, device=torch.device("meta"))
    model = family_of(config).model(config, build)
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
        weight_bytes=weight_bytes(model, choose(config, quantization).loaded, DTYPE_BYTES[name]),
        num_parameters=numbers,
        state_bytes=state_bytes(config, name),
        num_labels=config.num_labels,
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
    config = load_config(model_dir, headless=options.headless)
    facts = facts_of(config, model_dir, options.dtype, options.quantization)
    pooling = None
    if options.embed is not None or config.head != "lm":
        pooling = read_pooling(model_dir, config, options.embed or PoolingWish())
    context = options.context_len or facts.context_len
    plan = _Plan(
        model_dir=model_dir,
        config=config,
        options=options,
        build=Build(
            dtype=getattr(torch, facts.dtype), length=context, device=torch.device(options.device)
        ),
        limits=BatchLimits(
            max_tokens=options.max_batch_tokens,
            max_reqs=options.max_running_reqs,
            max_pages_per_req=-(-(context + 1) // options.page_size),
        ),
        progress=progress,
        pooling=pooling,
    )
    made = _with_program(plan) or _with_tensors(plan)
    states = plan.states
    batch = ForwardBatch(plan.limits, made.pool, made.attention, plan.build.device, states)
    parts = sampling or SamplingParts()
    worker = Worker(
        made.runner,
        batch,
        Sampler(parts.custom),
        config.vocab_size,
        _pooler(plan, made.runner),
        constraints=parts.constraints,
    )
    num_states = states.num_slots if states else 0
    caps = ExecutorCaps(
        max_batch_tokens=options.max_batch_tokens,
        max_running_reqs=options.max_running_reqs,
        num_states=num_states,
        both_ways=not config.causal,
        pools_all=pooling is not None and pooling.reads_all,
    )
    facts = replace(facts, runner=made.name, num_states=num_states)
    if pooling is not None:
        facts = replace(facts, vector_size=pooling.size)
    return LocalExecutor(worker, caps, overlap=options.overlap), facts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What both ways of running a model are made from."""

    model_dir: Path
    config: ModelConfig
    options: LocalOptions
    build: Build
    limits: BatchLimits
    progress: Progress | None
    pooling: PoolingSpec | None = None

    def model(self) -> Any:
        """A new model without contents."""
        return family_of(self.config).model(self.config, self.build)

    @property
    def formats(self) -> Formats:
        """How matrices are quantised."""
        return choose(self.config, self.options.quantization)

    @property
    def kv_shape(self) -> KVShape:
        """What the pool holds."""
        config, latent = self.config, self.config.latent
        return KVShape(
            num_layers=config.kv_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=latent.latent + latent.turning if latent else config.head_dim,
            num_pages=self.options.num_pages,
            page_size=self.options.page_size,
        )

    @property
    def states(self) -> TensorStates | None:
        """Memory for recurrent states, if the model has any."""
        if not self.config.states:
            return None
        parts = [
            (part.shape, torch.float32 if part.exact else self.build.dtype)
            for part in self.config.states
        ]
        count = self.options.num_states or 2 * self.options.max_running_reqs + 1
        return TensorStates(parts, count, self.build.device)


@dataclass(frozen=True, slots=True)
class _Made:
    name: str
    runner: GraphRunner
    pool: KVCachePool
    attention: AttentionBackend


def _with_program(plan: _Plan) -> _Made | None:
    """A recorded step program; None where it cannot be had and was not asked for by name."""
    labels_of_all = plan.pooling and plan.config.num_labels and plan.pooling.reads_all
    if plan.options.runner == "eager":
        return None
    if plan.options.runner == "auto" and (labels_of_all or not plan.config.causal):
        return None
    try:
        return _record(plan)
    except (Unsupported, LibraryMissing) as why:
        if plan.options.runner == "program":
            raise ConfigError(
                f"runner program cannot be used: {why}; runner eager serves every model"
            ) from None
        logger.warning("no step program, PyTorch computes each op: %s", why)
        return None


def _record(plan: _Plan) -> _Made:
    if plan.build.device.type != "cpu":
        raise Unsupported(f"step programs run on the CPU, not on {plan.build.device}")
    if plan.options.attention not in ("auto", "native"):
        raise Unsupported(f"attention {plan.options.attention!r} was asked for")
    if plan.config.path == "transformers":
        raise Unsupported("the model runs through transformers")
    if plan.config.states:
        raise Unsupported("some layers keep a recurrent state")
    library = load_library()
    pool = NativePool(plan.kv_shape, plan.build.dtype)
    model = plan.model()
    if plan.options.load_format == "dummy":
        dummy_weights(model, plan.options.seed, plan.formats.converted)
    else:
        defer_weights(model, plan.model_dir, plan.progress, plan.formats.converted)
    runner = ProgramRunner(
        model,
        plan.limits,
        pool,
        library,
        dtype=plan.build.dtype,
        threads=plan.options.threads or torch.get_num_threads(),
    )
    return _Made(f"program ({library.variant})", runner, pool, NativeAttention())


def _pooler(plan: _Plan, runner: GraphRunner) -> Pooler | None:
    if plan.pooling is None:
        return None
    labels = plan.config.num_labels
    if labels and plan.pooling.reads_all and not isinstance(runner, EagerRunner):
        raise ConfigError("runner program reads labels from the last token only; use eager")
    head = runner.head if isinstance(runner, EagerRunner) else None
    return Pooler(plan.pooling, labels=labels > 0, head=head)


def _with_tensors(plan: _Plan) -> _Made:
    attention = load_attention(plan.options.attention, plan.build.device)
    if not plan.config.causal:
        attention = NullAttention()  # such layers attend by themselves
    model = plan.model()
    if plan.config.path == "transformers":
        _load_by_transformers(model, plan)
    elif plan.options.load_format == "dummy":
        dummy_weights(model, plan.options.seed, plan.formats.converted)
    else:
        load_weights(model, plan.model_dir, plan.progress, plan.formats.converted)
    pool = tensor_pool(plan.config, plan.kv_shape, plan.build)
    return _Made("eager", EagerRunner(model), pool, attention)


def _load_by_transformers(model: Any, plan: _Plan) -> None:
    if plan.options.load_format == "dummy":
        raise ConfigError("load_format dummy serves native families only")
    model.load(plan.model_dir)


def tensor_pool(config: ModelConfig, shape: KVShape, build: Build) -> KVCachePool:
    """The pool of what a model's attention keeps of a token."""
    if not config.causal:
        return NoPool(shape.num_pages, shape.page_size)
    if config.latent is not None:
        return LatentPool(shape, config.latent.latent, build.dtype, build.device)
    return MHAPool(shape, build.dtype, build.device)


def load_attention(name: str, device: torch.device) -> Any:
    """Make a backend by its name; `auto` takes the fused one of PyTorch.

    Raises:
        ConfigError: there is none of that name, or not for this device.
    """
    backend = plugins.load(attention_backends, "torch" if name == "auto" else name).BACKEND
    if device.type not in backend.caps.devices:
        raise ConfigError(f"the attention backend {name!r} does not run on {device.type}")
    if "eager" not in backend.caps.runners:
        runners = ", ".join(sorted(backend.caps.runners))
        raise ConfigError(f"the attention backend {name!r} is part of runner {runners} only")
    return backend()


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
