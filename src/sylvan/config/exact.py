"""Whether answers keep their bits whatever else is batched, cached or chunked; and why not."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.config.facts import DeviceFacts, Facts
from sylvan.config.tree import Config


@dataclass(frozen=True, slots=True)
class DeterminismBlocker:
    """What makes bits depend on the batch, and what to do about it."""

    cause: str
    way: str


def obstacle(config: Config, facts: Facts) -> DeterminismBlocker | None:
    """What is in the way of `deterministic` with these settings; None: nothing is.

    A model that turns out not to be recordable when it is loaded is none of these.
    """
    device = facts.devices.get(config.device)
    attention = facts.attention.get(config.attention)
    found = None
    if device is None:
        return None
    if not device.exact_runners:
        found = _without_kernels(device)
    elif facts.model.state_numbers:
        cause = "PyTorch computes recurrent layers, and its bits depend on the batch"
        found = DeterminismBlocker(cause, "leave deterministic at auto")
    elif config.runner not in device.exact_runners:
        cause = f"with runner={config.runner} PyTorch computes, whose bits depend on the batch"
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


def _without_kernels(device: DeviceFacts) -> DeterminismBlocker:
    if device.kind != "cpu":
        cause = f"PyTorch multiplies matrices on {device.kind}, and its bits depend on the batch"
        return DeterminismBlocker(cause, "serve on device=cpu, or leave deterministic at auto")
    cause = "no native kernels are compiled here, and PyTorch's bits depend on the batch"
    way = "install g++ and run python -m sylvan.kernels.build, or leave deterministic at auto"
    return DeterminismBlocker(cause, way)
