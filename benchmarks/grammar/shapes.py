"""The models for grammar benchmarks: a directory, a built-in name, or a shape."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

SAPLING = Path(str(files("sylvan") / "assets" / "sapling"))
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": 64,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "use_sliding_window": False,
    }
}
"""Random weights, with the tokenizer of the built-in model."""


@contextmanager
def served(model: str) -> Iterator[dict[str, Any]]:
    """Return the engine's keywords for a directory, a name, or one of `SHAPES`."""
    if model not in SHAPES:
        yield {"model_path": model}
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in SAPLING.glob("*token*.json"):
            shutil.copy(file, folder)
        (folder / "config.json").write_text(json.dumps(SHAPES[model]))
        yield {"model_path": name, "load_format": "dummy"}


def progress(text: str) -> None:
    """Report progress on standard error."""
    print(text, file=sys.stderr, flush=True)
