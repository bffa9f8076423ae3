"""Google's TPUs: facts for configuration and planning; a runner has to come from elsewhere."""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts


class TpuKind:
    """Never usable by itself."""

    facts: ClassVar = PlatformFacts(
        name="tpu",
        device_type="xla",
        attention=(),
        runners=(),
        dtypes=frozenset({"float32", "bfloat16"}),
        collective="gloo",
    )

    def problem(self) -> str | None:
        return (
            "Sylvan has no kernels for TPUs; install a package that offers a platform of its own "
            "(entry point group sylvan.platforms), or choose device=cpu or auto"
        )

    def memory(self) -> tuple[int, int] | None:
        return None


KIND = TpuKind()
