"""Build hook: compiles the C++ kernels into the wheel, or in place for an editable install.

Without a compiler the build still succeeds: the wheel is then pure Python, and PyTorch computes.
Wheels and source distributions also get a file that names their commit.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelBuildHook(BuildHookInterface[Any]):
    """Runs `sylvan/kernels/build.py`, which needs nothing but the standard library and g++."""

    PLUGIN_NAME = "custom"
    _made: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as made for this platform if that gave libraries."""
        if version != "editable":
            self._name_commit(build_data)
        if self.target_name == "wheel":
            self._compile(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made for packing."""
        del version, build_data, artifact_path
        if self._made is not None:
            self._made.cleanup()

    def _name_commit(self, build_data: dict[str, Any]) -> None:
        revision = _load(Path(self.root) / "src/sylvan/utils/revision.py")
        if (Path(self.root) / "src/sylvan" / revision.WRITTEN).exists():
            return  # of a source distribution: it is packed like the files beside it
        if commit := revision.commit():
            self._made = tempfile.TemporaryDirectory()
            written = Path(self._made.name) / revision.WRITTEN
            written.write_text(f"{commit}\n")
            folder = "src/sylvan" if self.target_name == "sdist" else "sylvan"
            build_data["force_include"][str(written)] = f"{folder}/{revision.WRITTEN}"

    def _compile(self, build_data: dict[str, Any]) -> None:
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
    spec = importlib.util.spec_from_file_location(f"sylvan_build_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
