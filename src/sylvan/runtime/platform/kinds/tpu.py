"""Google TPUs through JAX. Tests lower the kernels for them; nothing has been run on one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import OR_CPU, jax_problem, tpu_memory


class TpuKind:
    """TPUs; looks for the device files before it imports JAX. Never chosen by `auto`."""

    facts: ClassVar = PlatformFacts(
        name="tpu",
        device_type="cpu",
        attention=("pallas", "jnp"),
        runners=("program",),
        dtypes=frozenset({"float32", "bfloat16"}),
        streams=False,
        state="lowered for TPUs, never run on one",
        how="a TPU VM, pip install 'sylvan[tpu]'",
        opener="sylvan.runtime.platform.jax_devices:open_jax",
        lowering="sylvan.runtime.executor.xla.build:build_lowered",
    )

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` replaces this machine in tests."""
        self._root = root

    def problem(self) -> str | None:
        if not any(self._root.glob("dev/accel*")) and not any(self._root.glob("dev/vfio/[0-9]*")):
            return (
                "no TPU is attached to this machine (/dev/accel*, /dev/vfio/*); start it on a TPU "
                f"VM, check the same programs on a CPU with device=jax, {OR_CPU}"
            )
        return jax_problem("tpu", "libtpu")

    def memory(self) -> tuple[int, int] | None:
        return tpu_memory()


KIND = TpuKind()
