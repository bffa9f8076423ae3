"""Build hook: compiles the C++ kernels into the wheel, or in place for an editable install.

Without a compiler the build still succeeds: the wheel is then pure Python, and PyTorch computes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelBuildHook(BuildHookInterface[Any]):
    """Runs `sylvan/kernels/build.py`, which needs nothing but the standard library and g++."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as made for this platform if that gave libraries."""
        del version
        build = _load(Path(self.root) / "src/sylvan/kernels/build.py")
        built = build.build()
        for name, why in built.failures.items():
            self.app.display_warning(f"sylvan: no {name} kernels: {why}")
        if not built.libraries:
            self.app.display_warning(
                "sylvan: without compiled kernels PyTorch computes, several times slower; "
                "install g++ and run: python -m sylvan.kernels.build"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = build.wheel_tag()
        build_data["artifacts"].append("src/sylvan/kernels/lib/*.so")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sylvan_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
