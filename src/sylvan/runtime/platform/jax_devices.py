"""JAX devices as a platform: memory and names. Step programs run on them, torch tensors do not."""

from __future__ import annotations

import jax

from sylvan.config.env import cache_dir
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.api import Memory
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.host import HostPlatform


class JaxPlatform(HostPlatform):
    """Implements `Platform`: tensors are on the host, and programs use the JAX devices.

    Attributes:
        chip: JAX's name of the device, such as `TPU v5e` or `cpu`.
    """

    def __init__(self, facts: PlatformFacts) -> None:
        super().__init__(facts)
        self._first = jax.devices()[0]
        self.chip = self._first.device_kind

    def memory(self) -> Memory:
        """Memory of one device; of the machine if JAX computes on its CPU."""
        stats = self._first.memory_stats() or {}
        total = stats.get("bytes_limit", 0)
        return Memory(total - stats.get("bytes_in_use", 0), total) if total else super().memory()


def open_jax(facts: PlatformFacts) -> JaxPlatform:
    """Open TPUs, or JAX's CPU backend, with a compilation cache on disk.

    Raises:
        ConfigError: JAX has no such devices, or they are in use.
    """
    jax.config.update("jax_platforms", "tpu" if facts.name == "tpu" else "cpu")
    if jax.config.jax_compilation_cache_dir is None:  # JAX_COMPILATION_CACHE_DIR sets it
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        return JaxPlatform(facts)
    except RuntimeError as error:  # no backend
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"device={facts.name}: JAX cannot use it: {why}; end the process that holds it, or "
            "choose device=cpu"
        ) from None
