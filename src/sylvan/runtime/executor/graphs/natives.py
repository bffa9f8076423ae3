"""What of a model that is not ours runs on native kernels."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.kernels.native.library import Library
from sylvan.runtime.attention.native import NativeCalls
from sylvan.runtime.executor.graphs.pages import NativePool


@dataclass(frozen=True, slots=True)
class Native:
    """Kernels in use, and pages with the attention over them where that is native, too."""

    library: Library
    pool: NativePool | None = None
    attention: NativeCalls | None = None

    @property
    def name(self) -> str:
        """Of the runner, for people."""
        what = "linears and attention" if self.attention else "linears"
        return f"eager (native {what}, {self.library.variant})"
