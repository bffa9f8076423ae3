"""JAX's CPU backend with four virtual devices; without the package nothing here runs."""

from __future__ import annotations

import importlib.util
import os
import tempfile

FLAG = "--xla_force_host_platform_device_count=4"

if importlib.util.find_spec("jax") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # both are read when JAX starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="sylvan-jax-"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
