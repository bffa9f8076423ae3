"""Builds a scheduler with all its parts from a configuration: the composition root."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.config.facts import ON_JAX
from sylvan.config.fields import replaced
from sylvan.config.load import dump
from sylvan.config.load_cache import load_cache_dir, load_cache_share
from sylvan.config.plan import useful_tokens
from sylvan.config.tree import DRAFT_HEADS, OWN_HEAD
from sylvan.kernels import describe
from sylvan.kernels.native.cost import OpCost
from sylvan.kernels.native.library import load as load_library
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.engine.compose import (
    compose_scheduler,
    effective_config,
    grammar_of,
    number,
    resolved,
    scheduler_limits,
)
from sylvan.runtime.engine.corpus import given_corpora, known_contexts
from sylvan.runtime.engine.engine_core import Emit, EngineCore, Scalar
from sylvan.runtime.engine.progress import LoggedProgress, Progress
from sylvan.runtime.engine.ranks import RankGroup, one_rank, with_same_bits
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.early.allowed import may_start_early
from sylvan.runtime.executor.early.key import program_name
from sylvan.runtime.executor.early.memory import InheritedMemory
from sylvan.runtime.executor.facts import LoadedModelInfo, read_facts
from sylvan.runtime.executor.options import ExecutorParts, LocalOptions, ModelContext
from sylvan.runtime.features.diffusion.build import (
    diffusion_control,
    diffusion_worker,
    max_rows,
)
from sylvan.runtime.features.disagg.build import DisaggParts
from sylvan.runtime.features.grammar.build import Grammar, with_worker
from sylvan.runtime.features.grammar.build_control import GrammarParts
from sylvan.runtime.features.kv_events.publisher import KVEventPublisher
from sylvan.runtime.features.lora.adapters import LoraAdapters
from sylvan.runtime.features.lora.build import lora_worker
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.features.multimodal.text_encoder import encoder_facts
from sylvan.runtime.features.pdmux.build import PdMuxParts
from sylvan.runtime.features.speculation.build import (
    AnySpeculation,
    build_speculation,
    tree_shape,
)
from sylvan.runtime.features.speculation.corpus import GivenCorpora
from sylvan.runtime.features.speculation.draft_model import DraftModel
from sylvan.runtime.features.speculation.head_worker import NoHeadWorker
from sylvan.runtime.features.speculation.heads import head_worker
from sylvan.runtime.features.speculation.medusa_worker import medusa_worker
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.features.tiers.build import TiersParts
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.models.pooling import PoolingOverride
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.models.siglip import padding_facts
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.storage.identity import kv_manifest
from sylvan.runtime.storage.manifest import GroupLayout, Manifest
from sylvan.utils.machine import inspect_machine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExtraCapabilities:
    """Both halves of capabilities that are not in the configuration."""

    capabilities: tuple[Capability, ...] = ()
    workers: tuple[Callable[[ModelContext], CapabilityWorker | None], ...] = ()


def build_scheduler(
    config: Config,
    emit: Emit,
    progress: Progress | None = None,
    also: ExtraCapabilities = ExtraCapabilities(),
    ranks: RankGroup | None = None,
) -> EngineCore:
    """Load the model, and build everything that serves it.

    Args:
        config: May contain `auto`.
        emit: Receives the outputs of each step.
        progress: Called with the number of loaded bytes; None: progress is logged.
        also: Additional capabilities.
        ranks: The other ranks that hold the model; None: there are none.

    Raises:
        ConfigError: Something cannot be served; one clear sentence.
        RankLostError: Another rank did not start.
    """
    given = config = with_same_bits(resolved(config))
    mesh = ranks.start(config) if ranks else one_rank(config)
    _warn_of_no_kernels(config)
    grammar = _grammar(config)
    lora = LoraAdapters(config.lora) if config.lora else None
    tiers = TiersParts(config.tiers) if config.tiers is not None else None
    disagg = _disagg(config)
    pdmux = PdMuxParts(config.pdmux)
    workers = (
        lambda context: grammar.worker,
        partial(media_worker, settings=config.media),
        partial(diffusion_worker, settings=config.diffusion),
        *disagg.workers,
        *pdmux.workers,
        *_lora_worker(config),
        *([tiers.worker] if tiers else ()),
        *_head(config),
        *also.workers,
    )
    executor, model = _own_executor(config, workers, mesh, progress)
    if ranks:
        warn_of_few_cores(config, inspect_machine().cores)
        executor = ranks.executor(executor, mesh)
    if model.num_pages:  # share of device memory, known only now
        tokens = (model.num_pages - 1) * number(config.cache.page_size)
        config = replaced(config, {"cache.max_tokens": tokens})
    config = effective_config(config, model.runner, exact=model.exact)
    if tiers is not None:
        tiers.open(given, model, model_dir(config.model))
    disagg.open(_identity(config, model))
    publisher = KVEventPublisher(config.kv_events) if config.kv_events else None
    capabilities: tuple[Capability, ...] = (
        grammar.control,
        *([lora.control] if lora else ()),
        *also.capabilities,
        *pdmux.controls(may_transfer=disagg.receives),
    )
    draft, corpora = _draft_model(config), given_corpora(config)
    speculation = _speculation(config, executor, model, draft, corpora)
    if speculation is not None:
        capabilities = (*capabilities, speculation)
    whole = load_config(model_dir(config.model), trusted=config.trust_remote_code)
    media = media_control(config.media, whole)
    placeholders = whole.media.token_ids if whole.media is not None and media else {}
    scheduler, inspect = compose_scheduler(
        config,
        executor,
        emit,
        lambda cache: (
            *capabilities,
            *media,
            *diffusion_control(config, whole, number(config.context_len)),
            *(disagg.controls(cache, tiers) if isinstance(cache, KVCacheManager) else ()),
        ),
        publisher,
        tiers,
    )

    def close() -> None:
        executor.close()
        if draft is not None:
            draft.close()
        if publisher is not None:
            publisher.close()
        grammar.close()

    facts = {
        **_facts(config, model),
        "max_total_tokens": scheduler.load().max_total_num_tokens,
        "architecture": whole.media.architecture if whole.media else model.architecture,
        **{f"{kind}_token_id": token for kind, token in placeholders.items()},
        **encoder_facts(whole, model_dir(config.model), number(config.context_len)),
        **padding_facts(whole),
        "block": whole.diffusion and (config.diffusion.block or whole.diffusion.block),
        "adapters": lora.load(executor) if lora else None,
    }
    _save(given, model, facts)
    return EngineCore(
        scheduler,
        facts=facts,
        state=lambda: _state(config, grammar, model, speculation, disagg),
        inspect=inspect,
        executor=executor,
        close=close,
        grammar_counts=grammar.counts,
        media_counts=lambda: media[0].counts.load if media else {},
        bucket_counts=lambda: _bucket_counts(model),
        disagg_load=disagg.load,
        draft_seconds_saved=lambda: speculation.saved_s if speculation is not None else 0.0,
        weight_version=config.weight_version,
        lora=lora,
        corpora=corpora,
        stores=tiers.stores if tiers else None,
        parallel=config.parallel,
    )


def _warn_of_no_kernels(config: Config) -> None:
    if config.device == "cpu" and (lack := describe().reasons.get("none")):
        logger.warning("no native kernels: using PyTorch, several times slower: %s", lack)


def _save(config: Config, model: LoadedModelInfo, facts: Mapping[str, Scalar]) -> None:
    """Save the step program for later starts, if they can use it."""
    own = facts.get("block") or facts.get("decoder_prompt")  # steps that PyTorch takes part in
    if model.save is not None and not own and may_start_early(config):
        model.save(program_name(config, load_library().variant), facts)


def _facts(config: Config, model: LoadedModelInfo) -> dict[str, Scalar]:
    return {
        "context_len": number(config.context_len),
        "vocab_size": model.vocab_size,
        "page_size": number(config.cache.page_size),
        "max_running_reqs": number(config.scheduler.max_running_reqs),
        "dtype": model.dtype,
        "runner": model.runner,
        "deterministic": bool(config.deterministic),
        "task": config.task,
        "vector_size": model.vector_size or model.num_labels,
        "forms": ",".join(model.forms),
        "num_parameters": model.num_parameters,
        "weight_bytes": model.weight_bytes,
        "kv_bytes": model.kv_bytes,
        "state_bytes": model.num_states * model.state_bytes,
        "weight_version": config.weight_version,
        "word_times": config.device not in ON_JAX,
    }


def _disagg(config: Config) -> DisaggParts:
    server = config.server
    plain = server.uds is None and server.ssl_certfile is None
    key = server.api_key.reveal() if server.api_key is not None else ""
    return DisaggParts(
        config.disagg, server.host, http_port=server.port if plain else 0, api_key=key
    )


def _identity(
    config: Config, model: LoadedModelInfo
) -> Callable[[Sequence[KVGroup], Sequence[PageMemory]], Manifest]:
    """Return the properties that servers must share to exchange KV of this model."""

    def identity(groups: Sequence[KVGroup], memory: Sequence[PageMemory]) -> Manifest:
        return kv_manifest(
            config,
            model_dir(config.model),
            dtype=model.dtype,
            runner=model.runner,
            page_size=groups[0].page_size,
            groups=tuple(
                GroupLayout(group.name, group.kind, each.page_bytes, group.window)
                for group, each in zip(groups, memory, strict=True)
            ),
        )

    return identity


def _head(config: Config) -> Sequence[Callable[[ModelContext], CapabilityWorker | None]]:
    """Return the factory of the draft head's worker half, if there is one."""
    given = config.speculative
    if given is None or given.algorithm not in (*DRAFT_HEADS, OWN_HEAD):
        return ()
    path = model_dir(given.draft_model) if given.draft_model is not None else None
    if given.algorithm == "medusa" and path is not None:
        return (medusa_worker(path, tree_shape(given)),)
    depth = number(given.num_steps)
    return (head_worker(path, given.algorithm, depth, tree_shape(given)),)


def _lora_worker(config: Config) -> Sequence[Callable[[ModelContext], CapabilityWorker | None]]:
    """Return the factory of LoRA's worker half, if adapters are served."""
    return () if config.lora is None else (lora_worker(config.lora),)


def build_rank(config: Config, mesh: Mesh) -> tuple[Executor, Callable[[], None]]:
    """Build the executor of a rank other than the first, and its clean-up.

    Args:
        config: The first rank's resolved configuration.
        mesh: The process mesh.

    Raises:
        ConfigError: See `build_scheduler`.
    """
    grammar = _grammar(config)
    disagg = _disagg(config)
    tiers = TiersParts(config.tiers) if config.tiers is not None else None
    workers = (
        lambda context: grammar.worker,
        partial(media_worker, settings=config.media),
        *disagg.workers,
        *_lora_worker(config),
        *([tiers.worker] if tiers else ()),
    )
    if _head(config):  # only the first rank drafts
        workers = (*workers, lambda context: NoHeadWorker())
    executor, model = _own_executor(config, workers, mesh, None)
    if tiers is not None:
        tiers.open(config, model, model_dir(config.model))
    disagg.open(_identity(config, model))

    def close() -> None:
        executor.close()
        grammar.close()

    return executor, close


def build_late(config: Config, grammar: GrammarParts, memory: InheritedMemory) -> Executor:
    """Build the executor that continues where a saved program ended.

    Args:
        config: Resolved.
        grammar: Its worker half will be part of the executor.
        memory: Of the saved program.

    Raises:
        ConfigError: See `build_scheduler`.
    """
    worker = with_worker(grammar).worker
    workers = (lambda context: worker, partial(media_worker, settings=config.media))
    return _own_executor(config, workers, one_rank(config), None, memory)[0]


def _grammar(config: Config) -> Grammar:
    path, trusted = model_dir(config.model), config.trust_remote_code
    return with_worker(grammar_of(config, load_config(path, trusted=trusted).vocab_size))


def _own_executor(
    config: Config,
    workers: Sequence[Callable[[ModelContext], CapabilityWorker | None]],
    mesh: Mesh,
    progress: Progress | None,
    memory: InheritedMemory | None = None,
) -> tuple[Executor, LoadedModelInfo]:
    """Build this process's executor, with worker halves besides the standard ones."""
    torch.set_num_threads(number(config.threads))
    return build_executor(
        model_dir(config.model),
        _options(config),
        progress=progress or LoggedProgress(config.quantization),
        parts=ExecutorParts((*STANDARD_WORKERS, *workers), memory=memory),
        mesh=mesh,
    )


def warn_of_few_cores(config: Config, cores: int) -> None:
    """Log that the ranks of this machine have more threads than it has cores, if they have."""
    ranks = config.parallel.ranks_per_node
    wanted = ranks * number(config.threads)
    if wanted > cores:
        logger.warning(
            "%d ranks with threads=%s: %d threads on %d cores wait for each other; reduce "
            "parallel.tp, parallel.pp or threads",
            ranks,
            config.threads,
            wanted,
            cores,
        )


def _speculation(
    config: Config,
    executor: Executor,
    model: LoadedModelInfo,
    draft: DraftModel | None,
    corpora: GivenCorpora | None,
) -> AnySpeculation | None:
    if config.speculative is None:
        return None
    if not executor.caps.draft_chains:
        raise ConfigError(
            f"speculative.algorithm={config.speculative.algorithm}: steps of runner "
            f"{model.runner} verify no drafts for this model; leave it out"
        )
    contexts = known_contexts(config, model.vocab_size)
    return build_speculation(config.speculative, model.vocab_size, draft, corpora, contexts)


def _draft_model(config: Config) -> DraftModel | None:
    """Build the draft model, with KV memory for as many tokens as the served model has."""
    given = config.speculative
    if given is None or given.algorithm != "standalone" or given.draft_model is None:
        return None
    path = model_dir(given.draft_model)
    facts = read_facts(path, config.dtype, None, trusted=config.trust_remote_code)
    options = replace(
        _options(config),
        context_len=min(facts.context_len, number(config.context_len)),
        quantization=None,
        fp8_activations=False,
        attention="auto",
        runner="auto",
        deterministic=False,
        load_format="auto",
        max_samples=0,
        embed=None,
        headless=False,
    )
    executor, facts = build_executor(path, options)
    return DraftModel(
        executor,
        limits=replace(scheduler_limits(config, executor.caps), preemption_threshold=None),
        context_len=min(facts.context_len, number(config.context_len)),
    )


def program_of(config: Config) -> tuple[str, Sequence[OpCost]]:
    """Load a model as for serving; return the runner's name, and the step program's ops if any.

    Raises:
        ConfigError: It cannot be served; one clear sentence.
    """
    config = resolved(config)
    mesh = one_rank(config)
    executor, facts = build_executor(model_dir(config.model), _options(config), mesh=mesh)
    executor.close()
    return facts.runner, facts.program


def _options(config: Config) -> LocalOptions:
    size = number(config.cache.page_size)
    running = number(config.scheduler.max_running_reqs)
    may_fall_back = config.runner == "program" and config.runner_fallback is True
    return LocalOptions(
        page_size=size,
        num_pages=-(-number(config.cache.max_tokens) // size) + 1,
        max_batch_tokens=number(config.scheduler.max_batch_tokens),
        max_running_reqs=running,
        context_len=number(config.context_len),
        dtype=config.dtype,
        device=config.device,
        devices=config.parallel.devices,
        data_groups=config.parallel.attention_groups if config.device in ON_JAX else 1,
        kv_dtype=config.cache.dtype,
        fill=config.device != "cpu" and config.cache.memory == "auto",
        max_pages=useful_tokens(number(config.context_len), running, size) // size + 1,
        # with `auto`, the executor falls back where the step program does not support something
        attention="auto" if may_fall_back else config.attention,
        runner="auto" if may_fall_back else config.runner,
        deterministic=config.deterministic is True and not may_fall_back,
        load_format=config.load_format,
        trusted=config.trust_remote_code,
        quantization=config.quantization,
        fp8_activations=config.fp8_activations,
        overlap=config.scheduler.overlap == "on" or config.parallel.pp > 1,
        max_samples=_max_sampled_rows(config, running),
        tree_paths=config.speculative.max_paths(running) if config.speculative else 0,
        tree_depth=number(config.speculative.num_steps) if config.speculative else 0,
        num_states=number(config.cache.max_states),
        embed=_pooling_override(config),
        headless=config.task == "embed",
        seed=config.seed or 0,
        load_cache=load_cache_dir(config),
        load_cache_share=load_cache_share(config),
    )


def _max_sampled_rows(config: Config, running: int) -> int:
    if config.speculative:
        return config.speculative.max_sampled_rows(running)
    model = load_config(model_dir(config.model), trusted=config.trust_remote_code)
    return max_rows(model, config.diffusion, running)


def _bucket_counts(model: LoadedModelInfo) -> Mapping[str, int]:
    """Return the fields of the scheduler's load for models whose steps are padded to buckets."""
    if model.use is None:
        return {}
    counts = model.use()
    names = {
        "bucket_rows": "rows",
        "bucket_padded_rows": "padded_rows",
        "recompilations": "recompiled",
    }
    return {field: int(counts[name]) for field, name in names.items()}


def _pooling_override(config: Config) -> PoolingOverride | None:
    if config.task == "generate":
        return None
    return PoolingOverride(mode=config.embedding.pooling, normalize=config.embedding.normalize)


def _state(
    config: Config,
    grammar: Grammar,
    model: LoadedModelInfo,
    speculation: AnySpeculation | None,
    disagg: DisaggParts,
) -> Mapping[str, Any]:
    loads = {name: load_E.tolist() for name, load_E in model.expert_load.items()}
    experts = {"expert_load": loads} if loads else {}
    buckets = {"buckets": dict(model.use())} if model.use else {}
    drafts = {"speculation": asdict(speculation.counts)} if speculation else {}
    own = {"config": dump(config), "grammar": asdict(grammar.stats()), **disagg.state()}
    return own | experts | drafts | buckets
