"""Whether answers have the same bits in any batch, and on any number of ranks; if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sylvan.config.facts import ON_JAX, DeviceFacts, Facts
from sylvan.config.tree import Config


@dataclass(frozen=True, slots=True)
class DeterminismBlocker:
    """A reason why results depend on the batch, and the remedy."""

    cause: str
    way: str


def determinism_blocker(config: Config, facts: Facts) -> DeterminismBlocker | None:
    """Return the reason why these settings prevent `deterministic`; None: they do not.

    Does not cover models that turn out to be untraceable when they are loaded.
    """
    device = facts.devices.get(config.device)
    attention = facts.attention.get(config.attention)
    found = None
    if device is None:
        return None
    if not device.exact_runners:
        found = _without_kernels(device)
    elif config.parallel.attention_groups > 1:
        cause = "ranks with different requests attend through PyTorch, whose results depend on it"
        found = DeterminismBlocker(cause, "use parallel.attention_dp=1")
    elif config.runner not in device.exact_runners:
        cause = f"runner={config.runner} uses PyTorch, whose results depend on the batch"
        way = "leave runner, attention, cache.page_size and cache.dtype at auto"
        found = DeterminismBlocker(cause, f"{way}, or deterministic")
    elif config.tiers is not None and config.tiers.host_dtype != "same":
        cause = f"tiers.host_dtype={config.tiers.host_dtype} rounds what is evicted"
        found = DeterminismBlocker(
            cause, "leave tiers.host_dtype at same, or deterministic at auto"
        )
    elif attention is not None and not attention.batch_invariant:
        cause = f"results of attention={config.attention} depend on the batch"
        found = DeterminismBlocker(cause, "leave attention at auto")
    return found


def same_bits_blockers(config: Config, facts: Facts) -> Mapping[str, str]:
    """Return the settings that prevent `parallel.same_bits`, each with a reason; empty: none.

    Does not cover the sizes of the model, which are known when it is built.
    """
    several, several_nodes = config.parallel.tp > 1, config.parallel.nodes > 1
    stored = facts.model.quantization
    reasons = {
        "{deterministic}": (config.deterministic is not True, "results depend on the batch then"),
        "{quantization}": (config.quantization is not None, "ranks quantise parts of rows"),
        "quantised weights": (stored is not None, "ranks quantise parts of rows"),
        "lora": (several and config.lora is not None, "adapter outputs are summed by rank"),
        "{parallel.nodes}": (several and several_nodes, "steps are not native then"),
    }
    return {what: why for what, (broken, why) in reasons.items() if broken}


def _without_kernels(device: DeviceFacts) -> DeterminismBlocker:
    if device.kind != "cpu":
        library = "XLA" if device.kind in ON_JAX else "PyTorch"
        cause = f"{library} multiplies matrices on {device.kind}, and results depend on the batch"
        return DeterminismBlocker(cause, "serve on device=cpu, or leave deterministic at auto")
    cause = "no native kernels are compiled here, and PyTorch's results depend on the batch"
    way = "install g++ and run python -m sylvan.kernels.build, or leave deterministic at auto"
    return DeterminismBlocker(cause, way)
