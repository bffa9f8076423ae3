"""JAX's CPU backend, which runs programs for TPUs without a TPU."""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import jax_problem
from sylvan.utils.machine import inspect_machine


class JaxKind:
    """JAX on a CPU; needs only the package jax. Never chosen by `auto`."""

    facts: ClassVar = PlatformFacts(
        name="jax",
        device_type="cpu",
        attention=("jnp", "pallas"),
        runners=("program",),
        dtypes=frozenset({"float32", "bfloat16"}),
        streams=False,
        state="run on JAX's CPU backend, kernels interpreted",
        how="pip install 'sylvan[jax]'",
        opener="sylvan.runtime.platform.jax_devices:open_jax",
        lowering="sylvan.runtime.executor.xla.build:build_lowered",
    )

    def problem(self) -> str | None:
        return jax_problem("jax")

    def memory(self) -> tuple[int, int] | None:
        machine = inspect_machine()
        return machine.available_bytes, machine.total_bytes


KIND = JaxKind()
