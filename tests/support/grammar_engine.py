"""Engines in this process that hold grammars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sylvan import Engine


def start(model: Path, **keywords: Any) -> Engine:
    """Over random weights of a tiny model, with the library that is always there."""
    known = {
        "load_format": "dummy",
        "device": "cpu",
        "threads": 1,
        "max_total_tokens": 4096,
        "grammar_backend": "llguidance",
    }
    return Engine(model_path=str(model), **(known | keywords))
