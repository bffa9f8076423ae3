"""Facts for resolving and checking a configuration: machine, model, installed packages.

Avoids importing torch where drivers provide the information, so that `sylvan config` is fast.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import sylvan.runtime.attention
import sylvan.runtime.cache.eviction
import sylvan.runtime.sched.policies
from sylvan import kernels
from sylvan.config.checkpoint import model_dir, model_facts, vocabulary_rows
from sylvan.config.facts import (
    QUANTISED_BITS,
    AttentionFacts,
    CheckpointInfo,
    DeviceFacts,
    Facts,
    cpu_facts,
)
from sylvan.config.load_cache import default_directory
from sylvan.config.tree import DRAFT_HEADS, Config
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.grammar.libraries import installed_backends
from sylvan.runtime.platform.facts import DeviceKind
from sylvan.runtime.platform.find import load_kinds, open_platform
from sylvan.utils import plugins
from sylvan.utils.machine import inspect_machine

_ANYWHERE = frozenset({"cpu", "cuda", "rocm", "xpu"})
_GPUS = frozenset({"cuda", "rocm"})
_NO_ATTENTION = "null"  # for layers that compute attention themselves; others produce garbage
TOKENIZER = "tokenizer.json"
_8_BIT = frozenset({"model", "fp8_e4m3", "fp8_e5m2"})
_SMALL = _8_BIT | {"int8", "int4"}

_ON_JAX = AttentionFacts(
    devices=frozenset({"jax", "tpu"}),
    page_sizes=frozenset(range(16, 257, 16)),
    page_size=16,
    runners=frozenset({"program"}),
    module="jax",
    extra="tpu",
)

ATTENTION: Mapping[str, AttentionFacts] = {
    "native": AttentionFacts(
        devices=frozenset({"cpu"}),
        page_sizes=frozenset(range(16, 257, 16)),
        page_size=64,
        batch_invariant=True,
        runners=frozenset({"program"}),
        kv_dtypes=_SMALL,
    ),
    "triton": AttentionFacts(
        devices=_GPUS,
        page_size=64,
        runners=frozenset({"eager", "graph"}),
        kv_dtypes=_SMALL,
        max_head_dim=1024,
        module="triton",
        extra="gpu",
    ),
    "flashinfer": AttentionFacts(
        devices=frozenset({"cuda"}),
        kv_dtypes=_8_BIT - {"fp8_e5m2"},
        dtypes=frozenset({"float16", "bfloat16"}),
        max_head_dim=256,
        module="flashinfer",
        extra="flashinfer",
    ),
    "aiter": AttentionFacts(
        devices=frozenset({"rocm"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        max_head_dim=256,
        module="aiter",
        install="pip install amd-aiter",
    ),
    "pallas": _ON_JAX,
    "jnp": _ON_JAX,
    "torch": AttentionFacts(devices=_ANYWHERE, kv_dtypes=_8_BIT),
    "reference": AttentionFacts(devices=_ANYWHERE, kv_dtypes=_8_BIT),
    "dense": AttentionFacts(
        devices=_ANYWHERE, runners=frozenset({"eager", "graph"}), kv_dtypes=_8_BIT
    ),
}
"""Backends that `auto` may choose, in order of preference; a test checks them against `caps`."""


def gather_facts(config: Config) -> Facts:
    """Inspect the machine, and the model that `config` names.

    Raises:
        ConfigError: The model or chat template does not exist, or is unreadable.
    """
    if config.text.chat_template is not None:
        from sylvan.runtime.engine.text import read_chat_template  # imports Jinja and tokenizers

        read_chat_template(config)  # fails here, before the model is loaded
    compiled = kernels.describe().variant is not None
    runners = ("program", "eager") if compiled else ("eager",)
    devices = {"cpu": cpu_facts(inspect_machine(), runners)}
    absent: dict[str, str] = {}
    kinds = load_kinds()
    for name, kind in kinds.items():
        if name == "cpu" or not _wanted(kind, config.device):
            continue
        if why := kind.problem():
            absent[name] = why
        else:
            devices[name] = _device(kind)
    return Facts(
        devices=devices,
        absent=absent,
        model=model_facts(config.model, trusted=config.trust_remote_code),
        **_draft(config),
        adapter_rank=_adapter_rank(config),
        attention={
            name: attention_of(name, facts, kinds.values())
            for name, facts in ATTENTION.items()
            if _usable(facts, compiled=compiled)
        },
        not_installed={
            name: facts.install or f"pip install 'sylvan[{facts.extra}]'"
            for name, facts in ATTENTION.items()
            if facts.module and importlib.util.find_spec(facts.module) is None
        },
        options={
            "device": tuple(kinds),
            "attention": tuple(
                name for name in plugins.options(sylvan.runtime.attention) if name != _NO_ATTENTION
            ),
            "cache.eviction": plugins.options(sylvan.runtime.cache.eviction),
            "scheduler.policy": plugins.options(sylvan.runtime.sched.policies),
            "grammar.backend": installed_backends(),
        },
        quantizations=frozenset(QUANTISED_BITS),
        load_cache=str(folder) if (folder := default_directory()) else None,
    )


_WEIGHTS = (".safetensors", ".pt", ".bin")


def _medusa(name: str, vocab_size: int) -> CheckpointInfo:
    """Return facts of Medusa heads, which have no KV: the size of their files."""
    try:
        files = [file for file in model_dir(name).iterdir() if file.suffix in _WEIGHTS]
        count = sum(file.stat().st_size for file in files) // 2  # approximately: 16-bit numbers
    except (ConfigError, OSError) as error:
        raise ConfigError(f"speculative.draft_model={name}: {error}") from None
    return CheckpointInfo(
        name=name,
        context_len=1,
        vocab_size=vocab_size,
        dtype="bfloat16",
        num_params=count,
        num_linear_params=count,
        kv_per_token=0,
        work_per_token=0,
    )


def _draft(config: Config) -> dict[str, Any]:
    """Return facts of the draft model, if there is one."""
    if config.speculative is None or config.speculative.draft_model is None:
        return {}
    if config.speculative.algorithm == "ngram":
        return {}  # a context tree, which is not a model
    name = config.speculative.draft_model
    if config.speculative.algorithm == "medusa":
        return {"draft": _medusa(name, vocabulary_rows(model_dir(config.model)) or 0)}
    try:
        facts = model_facts(name, trusted=config.trust_remote_code)
        ours, theirs = model_dir(config.model), model_dir(name)
        if config.speculative.algorithm in DRAFT_HEADS:  # draft heads have no tokenizer
            same = facts.vocab_size == vocabulary_rows(ours)
        else:
            same = _vocabulary(ours / TOKENIZER) == _vocabulary(theirs / TOKENIZER)
    except (ConfigError, OSError, ValueError) as error:
        raise ConfigError(f"speculative.draft_model={name}: {error}") from None
    return {"draft": facts, "draft_reads_alike": same}


def _adapter_rank(config: Config) -> int:
    """Return the largest rank of the configured adapters; 0 if none is readable."""
    ranks = [0]
    for path in config.lora.adapters.values() if config.lora else ():
        try:
            found = json.loads((Path(path) / "adapter_config.json").read_bytes())
            ranks += [found["r"], *(found.get("rank_pattern") or {}).values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # loading it will report the error
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)


def _vocabulary(tokenizer: Path) -> object:
    """Return the token strings; None if the tokenizer is of another kind."""
    if not tokenizer.is_file():
        return None
    table = json.loads(tokenizer.read_bytes())
    added = {token["id"]: token["content"] for token in table.get("added_tokens", ())}
    return table.get("model", {}).get("vocab"), added


def _wanted(kind: DeviceKind, device: str) -> bool:
    return device == kind.facts.name or (device == "auto" and kind.facts.automatic)


def attention_of(
    name: str, attention: AttentionFacts, kinds: Iterable[DeviceKind]
) -> AttentionFacts:
    """Return the backends that plug-in devices support, as they report."""
    also = {kind.facts.name for kind in kinds if name in kind.facts.attention}
    return replace(attention, devices=attention.devices | also)


def _usable(attention: AttentionFacts, *, compiled: bool) -> bool:
    if attention.module and importlib.util.find_spec(attention.module) is None:
        return False
    return compiled or "eager" in attention.runners or "cpu" not in attention.devices


def _device(kind: DeviceKind) -> DeviceFacts:
    """Return a usable device; it is opened only if its driver does not report its memory."""
    memory = kind.memory()
    if memory is None:
        found = open_platform(kind).memory()
        memory = found.free, found.total
    free, total = memory
    return DeviceFacts(
        kind=kind.facts.name,
        cores=inspect_machine().cores,
        total_bytes=total,
        available_bytes=free,
        fast_dtypes=kind.facts.dtypes,
        runners=kind.facts.runners,
        attention=kind.facts.attention,
    )
