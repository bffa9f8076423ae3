"""Facts for resolving and checking a configuration: this machine, the model, what is installed.

Imports torch only where there is a GPU to ask, so that `sylvan config` answers at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import sylvan.runtime.attention
import sylvan.runtime.cache.eviction
import sylvan.runtime.sched.policies
from sylvan import kernels
from sylvan.config.checkpoint import model_facts
from sylvan.config.facts import QUANTISED_BITS, AttentionFacts, DeviceFacts, Facts, cpu_facts
from sylvan.config.tree import Config
from sylvan.runtime.features.grammar.libraries import installed_backends
from sylvan.utils import plugins
from sylvan.utils.machine import inspect_machine

_ANYWHERE = frozenset({"cpu", "cuda"})

ATTENTION: Mapping[str, AttentionFacts] = {
    "native": AttentionFacts(
        devices=frozenset({"cpu"}),
        page_sizes=frozenset(range(16, 257, 16)),
        page_size=64,
        batch_invariant=True,
        runners=frozenset({"program"}),
    ),
    "torch_cpu": AttentionFacts(devices=_ANYWHERE, batch_invariant=True),
    "reference": AttentionFacts(devices=_ANYWHERE, batch_invariant=True),
}
"""Backends that `auto` may choose, the preferred ones first; a test holds them against `caps`."""

_GPU = Path("/dev/nvidia0")


def gather_facts(config: Config) -> Facts:
    """Look at the machine and at the model that `config` names.

    Raises:
        ConfigError: there is no such model, or its files cannot be read.
    """
    compiled = kernels.describe().variant is not None
    runners = ("program", "eager") if compiled else ("eager",)
    devices = {"cpu": cpu_facts(inspect_machine(), runners)}
    if _GPU.exists() and config.device != "cpu":
        devices |= _gpu()
    return Facts(
        devices=devices,
        model=model_facts(config.model),
        attention={n: a for n, a in ATTENTION.items() if compiled or "eager" in a.runners},
        options={
            "attention": plugins.options(sylvan.runtime.attention),
            "cache.eviction": plugins.options(sylvan.runtime.cache.eviction),
            "scheduler.policy": plugins.options(sylvan.runtime.sched.policies),
            "grammar.backend": installed_backends(),
        },
        quantizations=frozenset(QUANTISED_BITS),
    )


def _gpu() -> Mapping[str, DeviceFacts]:
    """The first GPU, if the installed torch can use it."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    dtypes = frozenset({"float32", "float16", "bfloat16"})
    facts = DeviceFacts(
        kind="cuda",
        cores=inspect_machine().cores,
        total_bytes=total,
        available_bytes=free,
        fast_dtypes=dtypes,
    )
    return {"cuda": facts}
