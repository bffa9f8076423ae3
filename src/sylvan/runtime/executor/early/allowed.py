"""Decides which configurations may start without PyTorch."""

from __future__ import annotations

from sylvan.config import Config
from sylvan.config.load_cache import load_cache_dir


def may_start_early(config: Config) -> bool:
    """Whether a resolved configuration saves its program and may run steps without PyTorch."""
    absent = (config.lora, config.speculative, config.disagg, config.pdmux, config.tiers)
    return (
        load_cache_dir(config) is not None
        and config.load_format != "dummy"
        and config.device == "cpu"
        and config.task == "generate"
        and config.parallel.ranks == 1
        and not config.trust_remote_code
        and all(section is None for section in absent)
    )
