"""Engines in this process that support grammars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sylvan import Engine


def start(model: Path, **keywords: Any) -> Engine:
    """Start an engine with random weights of a tiny model, and the library that is always
    installed.
    """
    known = {
        "load_format": "dummy",
        "device": "cpu",
        "threads": 1,
        "max_total_tokens": 4096,
        "grammar_backend": "llguidance",
    }
    return Engine(model_path=str(model), **(known | keywords))
