"""Runs Triton kernels on CPU tensors, in this process. Import it before any kernel.

Without Triton the import fails: call `importlib.util.find_spec("triton")` first. Triton decides at
decoration whether a function is compiled or interpreted, so the variable is set only while Triton
and our kernels are imported; other code and child processes do not see it. bf16 products are wrong
in the interpreter: use float32 and float16.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import sylvan.kernels

_VARIABLE = "TRITON_INTERPRET"
_LIBRARY = ("triton.language.standard", "triton.language.random", "triton.language")


def _kernels() -> list[str]:
    root = Path(sylvan.kernels.__file__).parent
    paths = [path.relative_to(root).with_suffix("") for path in root.glob("*/triton_*.py")]
    return sorted(f"sylvan.kernels.{path.parent.name}.{path.name}" for path in paths)


def _load() -> None:
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        # transformers may have imported Triton already, whose own functions are compiled then.
        for name in [name for name in _LIBRARY if name in sys.modules]:
            importlib.reload(sys.modules[name])
        importlib.import_module("triton.experimental.gluon")  # comes with the first launch
        early = [name for name in _kernels() if name in sys.modules]
        assert not early, f"imported before tests.support.interpreted: {early}"
        for name in _kernels():
            importlib.import_module(name)
    finally:
        del os.environ[_VARIABLE]
        if before is not None:
            os.environ[_VARIABLE] = before


_load()
